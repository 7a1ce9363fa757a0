"""`kvflow bench`: what kvflow costs and gains, measured on the machine at hand.

Nothing here is imported by the connector. Importing this package imports neither vllm, torch, nixl
nor matplotlib: engines are child processes, and what a command needs is imported when it runs.
"""
