from gcfed.methods.base import FederatedMethod
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.proximal import Proximal

__all__ = ["FederatedMethod", "GradientCentralization", "Proximal"]
