"""What each group of facts means: pure functions, one module per check."""
