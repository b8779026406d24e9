from __future__ import annotations

import commfuse_fx.sharding.rules  # noqa: F401  (registers the rules)
