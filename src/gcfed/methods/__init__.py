from gcfed.methods.base import FederatedMethod
from gcfed.methods.centralization import GradientCentralization
from gcfed.methods.fedcm import FedCM
from gcfed.methods.fedcurv import FedCurv
from gcfed.methods.feddc import FedDC
from gcfed.methods.feddecorr import FedDecorr
from gcfed.methods.feddyn import FedDyn
from gcfed.methods.fedgc import FedGC
from gcfed.methods.fedlc import FedLC
from gcfed.methods.fedmlb import FedMLB
from gcfed.methods.fedntd import FedNTD
from gcfed.methods.fedreg import FedReg
from gcfed.methods.fedsol import FedSol
from gcfed.methods.fedsub import FedSub
from gcfed.methods.fedvarp import FedVARP
from gcfed.methods.lookahead import LookAhead
from gcfed.methods.moon import Moon
from gcfed.methods.proximal import Proximal
from gcfed.methods.quantization import Quantization
from gcfed.methods.sam import Sam
from gcfed.methods.scaffold import Scaffold
from gcfed.methods.ssf import SSF

__all__ = [
    "SSF",
    "FedCM",
    "FedCurv",
    "FedDC",
    "FedDecorr",
    "FedDyn",
    "FedGC",
    "FedLC",
    "FedMLB",
    "FedNTD",
    "FedReg",
    "FedSol",
    "FedSub",
    "FedVARP",
    "FederatedMethod",
    "GradientCentralization",
    "LookAhead",
    "Moon",
    "Proximal",
    "Quantization",
    "Sam",
    "Scaffold",
]
