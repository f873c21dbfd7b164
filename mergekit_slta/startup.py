"""For start-up files of earlier checkouts, which import this name: gone once those are installed again."""

from _mergekit_slta_startup import install as install
