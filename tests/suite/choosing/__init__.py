"""Which test files a change concerns, read from names, imports and what SQL calls."""
