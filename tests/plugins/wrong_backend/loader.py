from d5suite.backends.torch.loader import native_loader

__all__ = ["native_loader"]
