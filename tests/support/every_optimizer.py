"""Every optimizer with the settings that select its branches."""

import penstock.updates as o

EVERY = [
    o.SGD(0.1),
    o.Adagrad(0.1),
    o.AdagradMomentum(0.1, momentum=0.9),
    o.AdagradMomentum(0.1, momentum=0.9, use_nesterov=True, beta2=0.9, epsilon=1e-3),
    o.FTRL(0.1),
    o.FTRL(0.1, l1_regularization_strength=0.05, l2_regularization_strength=0.1, beta=0.5),
    o.FTRL(0.1, l1_regularization_strength=0.05, multiply_linear_by_learning_rate=True),
    o.Adam(0.1),
    o.Adam(0.1, sum_inside_sqrt=False),
    o.Momentum(learning_rate=0.1, momentum=0.9),
    o.Momentum(learning_rate=0.1, momentum=0.9, use_nesterov=True),
    o.Lion(learning_rate=0.1),
    o.RMSProp(learning_rate=0.1, momentum=0.9),
    o.CenteredRMSProp(learning_rate=0.1, momentum=0.9),
    o.Adadelta(learning_rate=0.1),
    o.ProximalAdagrad(learning_rate=0.1, l1=0.05, l2=0.1),
    o.BoundedAdagrad(learning_rate=0.1, max_var_update=0.05, max_accumulator=1.0),
    o.OnlineYogi(learning_rate=0.1, l1=0.05, l2=0.1),
    o.ProximalYogi(learning_rate=0.1, l1=0.05, l2=0.1),
    o.FrequencyEstimator(learning_rate=17.0),
    o.Assign(),
    o.RowWiseAdagrad(learning_rate=0.1),
    o.RowWiseAdagrad(learning_rate=0.1, epsilon=1e-8, initial_accumulator_value=0.0),
    o.TorchAdagrad(0.1),
    o.TorchAdagrad(0.1, lr_decay=0.5, epsilon=1e-3),
    o.PartialRowWiseAdam(0.1),
]
NON_LAZY = [o.Adam(0.1, lazy_adam=False), o.Lion(learning_rate=0.1, use_non_lazy_lion=True)]


def named(optimizers):
    """The ids of optimizers as parameters."""
    return [f"{number}_{type(optimizer).__name__}" for number, optimizer in enumerate(optimizers)]
