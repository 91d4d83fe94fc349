"""The vLLM engine: stock vLLM whose recurrent layers keep checkpoints and rings in its pages.

Installing the package registers the plugin; `--additional-config '{"lazystate": {}}'` switches it
on.
"""
