"""Tables, figures and a page of many runs.

The package can be called, as ``gcfed.report(…)`` from Python.
"""

import sys
from types import ModuleType

from gcfed.report.build import write_report


class _Package(ModuleType):
    __call__ = staticmethod(write_report)


sys.modules[__name__].__class__ = _Package
