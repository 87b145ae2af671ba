"""Device and host pools of KV pages, and the copies between them. Needs torch.

Import from the modules: `geometry`, `device`, `host`, `allocator`, `transfer`, `ranks`, `paired`.
"""
