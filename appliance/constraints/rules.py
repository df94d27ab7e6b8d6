"""All rules. Each rule is declared in the module of its subject."""

from appliance.constraints import kernels, model, pages, ranks, weights

RULES = (*model.RULES, *kernels.RULES, *weights.RULES, *pages.RULES, *ranks.RULES)
