"""Inception v3 on ImageNet."""

from d5suite.cases.recipe import MEASUREMENTS, Acceptance, Preset, Recipe, Training
from d5suite.optimizers.schedules import StepDecay
from d5suite.optimizers.settings import SGD, RMSProp

# Few steps at a low rate: this network soon amplifies rounding errors, until a float32 run agrees
# with no other run, not even with the float64 run.
RECIPE = Recipe(
    name="imagenet_inception_v3",
    network="inception_v3",
    dataset="imagenet",
    optimizer=SGD(learning_rate=2**-14, momentum=0.9, weight_decay=1e-4),
    measurements=(*MEASUREMENTS, "step_breakdown", "time_to_accuracy"),
    label_smoothing=0.1,
    acceptance=Acceptance(trajectory_steps=3),
    on_request=True,
    presets={
        "smoke": Preset(image_size=139, batch_size=8, classes=10, max_time_s=0.5),
        "standard": Preset(image_size=299, batch_size=16, classes=1000, max_time_s=20.0),
        "full": Preset(
            image_size=299,
            batch_size=1600,
            classes=1000,
            optimizer=RMSProp(learning_rate=0.045, decay=0.9, epsilon=1.0, clip_norm=2.0),
            max_time_s=60.0,
            training=Training(
                target=0.788,
                epochs=100,
                runs=3,
                time_limit_s=None,
                schedule=StepDecay(milestones=tuple(range(2, 100, 2)), factor_each=0.94),
                source="Szegedy et al., 'Rethinking the inception architecture' (CVPR 2016), table 3: 21.2% error of "
                "one crop; section 8: batch 32 on each of 50 replicas, rate 0.045 times 0.94 every two epochs, "
                "gradients clipped at 2.0",
            ),
        ),
        "reduced": Preset(
            image_size=139,
            batch_size=2,
            classes=10,
            max_time_s=0.5,
            note="for backends written to be read rather than to be fast",
        ),
    },
)
