"""What can go wrong. Every message is the library's own and says what to do."""


class MetalAttentionError(Exception):
    """Any failure of this package."""


class ModelError(MetalAttentionError):
    """The file is missing, damaged or not supported, or the model cannot do what was asked."""


class DeviceError(MetalAttentionError):
    """There is no such device, or it has no room for the model."""


class OptionError(MetalAttentionError, ValueError):
    """An option outside its range."""


class PromptError(MetalAttentionError, ValueError):
    """A prompt that is empty, too long for the context, or has token ids the model does not know."""


class TemplateError(MetalAttentionError, ValueError):
    """The chat template does not compile, or refuses the messages."""


class HubError(MetalAttentionError):
    """A model could not be had from the hub."""


class EngineError(MetalAttentionError, RuntimeError):
    """The engine failed, or was closed, before the request was finished."""
