"""Sound models and planted bugs in ways of writing that other models of these tests do not have."""
