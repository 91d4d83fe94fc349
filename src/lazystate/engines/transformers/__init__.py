"""The transformers engine: stock hybrid models that decode through a `StateCache`."""

from lazystate.engines.transformers.observing import layer_spec
from lazystate.engines.transformers.patching import patch, patched, unpatch
from lazystate.engines.transformers.traffic import count_plain_state_bytes

__all__ = ["count_plain_state_bytes", "layer_spec", "patch", "patched", "unpatch"]
