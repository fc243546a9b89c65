from d5suite.backends.torch.operators import OPERATORS

__all__ = ["OPERATORS"]
