"""The SGLang side of specstack: plug-in, worker, CPU platform, server command."""
