"""Which tests a change concerns, and the inner loop that runs them."""
