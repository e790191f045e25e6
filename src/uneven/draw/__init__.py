"""Pictures of plans, losses and goodput as PNG or SVG, and the numbers that they show. Never loads torch.

May import values only.
"""

from uneven.draw.holdings import KV_HEADS, Held, Holding, holdings_of
from uneven.draw.loss import draw_loss
from uneven.draw.page import goodput_page
from uneven.draw.plan import draw_plan
from uneven.draw.tables import TextTable, tables_of

__all__ = [
    "KV_HEADS",
    "Held",
    "Holding",
    "TextTable",
    "draw_loss",
    "draw_plan",
    "goodput_page",
    "holdings_of",
    "tables_of",
]
