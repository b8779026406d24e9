"""The runtime runs compiled programs on one rank: process groups, storage, generated code and votes between ranks."""
