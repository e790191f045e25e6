"""Pictures of plans and of losses as PNG or SVG, and the numbers that they show. Never loads torch.

May import values only.
"""

from uneven.draw.holdings import KV_HEADS, Held, Holding, holdings_of
from uneven.draw.loss import draw_loss
from uneven.draw.plan import draw_plan

__all__ = ["KV_HEADS", "Held", "Holding", "draw_loss", "draw_plan", "holdings_of"]
