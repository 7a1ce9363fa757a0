"""`kvflow plan`: who writes what to whom, for engines that are described and need not exist."""
