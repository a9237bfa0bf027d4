"""Training: the loop, engines, checkpoints and the folder of a run.

The package has the name of the public function `tokmill.train(…)`, and Python puts a package over
a name of the same spelling once any of its modules is imported. So the package can be called.
"""

from __future__ import annotations

import sys
import types
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tokmill.train.run import Run


class _Package(types.ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> Run:
        """Train a model; see `tokmill.train.loop.train`."""
        from tokmill.train.loop import train

        return train(*arguments, **options)


sys.modules[__name__].__class__ = _Package
