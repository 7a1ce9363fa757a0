"""Input and output: the loop thread, the driver, the port, the side channel."""
