"""The package's exceptions. Messages are those of the library."""


class MetalAttentionError(Exception):
    """Any failure of this package."""


class ModelError(MetalAttentionError):
    """The file is missing, damaged or not supported, or the model cannot do this."""


class DeviceError(MetalAttentionError):
    """The device does not exist, or its memory is too small for the model."""


class OptionError(MetalAttentionError, ValueError):
    """An option outside its range."""


class PromptError(MetalAttentionError, ValueError):
    """A prompt that is empty, too long for the context, or has token ids outside the vocabulary."""


class TemplateError(MetalAttentionError, ValueError):
    """The chat template does not compile, or refuses the messages."""


class HubError(MetalAttentionError):
    """A model could not be downloaded from the hub."""


class EngineError(MetalAttentionError, RuntimeError):
    """The engine failed, or was closed, before the request was finished."""
