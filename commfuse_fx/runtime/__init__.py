"""What runs on a rank: process groups, storage, generated code, and agreement between ranks."""
