"""All rules. Each rule is declared in the module of its subject."""

from appliance.constraints import kernels, model, pages, ranks, speculation, weights

RULES = (*model.RULES, *kernels.RULES, *weights.RULES, *pages.RULES, *speculation.RULES, *ranks.RULES)
