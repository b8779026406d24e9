"""A step measures itself while it trains, tries other plans, and keeps the fastest."""
