"""`kvflow demo`: two real vLLM engines on this machine, and requests whose KV moves between them.

Nothing here is imported by the connector. Importing this package imports neither vllm, torch nor
nixl: engines are child processes, and the model is made by `kvflow.demo.model` when it is needed.
"""
