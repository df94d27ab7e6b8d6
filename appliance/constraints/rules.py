"""All rules. A rule stands in the file of its subject."""

from appliance.constraints import kernels, model, pages, ranks, weights

RULES = (*model.RULES, *kernels.RULES, *weights.RULES, *pages.RULES, *ranks.RULES)
