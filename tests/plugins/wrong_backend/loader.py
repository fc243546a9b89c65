from d5suite.backends.torch.loader import NAMES, native_loader

__all__ = ["NAMES", "native_loader"]
