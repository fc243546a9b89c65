"""ResNet-50 v1.5 on ImageNet."""

from d5suite.cases.recipe import MEASUREMENTS, Acceptance, Preset, Recipe, Training
from d5suite.optimizers.schedules import StepDecay
from d5suite.optimizers.settings import SGD

# `make bench` runs this recipe alone, on all backends, and must take minutes on two cores.
SHORT = {"step_breakdown": "this keeps make bench short; presets standard and full measure it"}
SHORT_RUN = Acceptance(trajectory_steps=4)

RECIPE = Recipe(
    name="imagenet_resnet50",
    network="resnet50",
    dataset="imagenet",
    optimizer=SGD(learning_rate=2**-8, momentum=0.9, weight_decay=1e-4),
    measurements=(*MEASUREMENTS, "step_breakdown", "time_to_accuracy"),
    presets={
        "smoke": Preset(
            image_size=96, batch_size=4, classes=10, max_time_s=0.8, leaves_out=SHORT, acceptance=SHORT_RUN
        ),
        "standard": Preset(
            image_size=224,
            batch_size=32,
            classes=1000,
            optimizer=SGD(learning_rate=0.0125, momentum=0.9, weight_decay=1e-4),
            max_time_s=20.0,
            note="the rate is Goyal et al.'s linear scaling rule: 0.1 × 32 / 256",
        ),
        "full": Preset(
            image_size=224,
            batch_size=256,
            classes=1000,
            optimizer=SGD(learning_rate=0.1, momentum=0.9, weight_decay=1e-4),
            max_time_s=60.0,
            training=Training(
                target=0.764,
                epochs=90,
                runs=3,
                time_limit_s=None,
                schedule=StepDecay(milestones=(30, 60, 80), warmup_epochs=5),
                source="Goyal et al., 'Accurate, large minibatch SGD' (2017), table 1: 23.60% error, batch 256, "
                "90 epochs",
            ),
            note="He et al. (CVPR 2016), section 3.4: batch 256, rate 0.1 divided by 10 on plateaus, decay 1e-4",
        ),
        "reduced": Preset(
            image_size=48,
            batch_size=2,
            classes=10,
            max_time_s=0.4,
            leaves_out=SHORT,
            acceptance=SHORT_RUN,
            note="for backends written to be read rather than to be fast",
        ),
    },
    acceptance=Acceptance(trajectory_steps=10),
)
