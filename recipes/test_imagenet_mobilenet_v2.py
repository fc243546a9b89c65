"""MobileNet v2 on ImageNet."""

from d5suite.cases.recipe import MEASUREMENTS, Acceptance, Preset, Recipe, Training
from d5suite.optimizers.schedules import StepDecay
from d5suite.optimizers.settings import SGD, RMSProp

# Few steps at a low rate: this network soon amplifies rounding errors, until a float32 run agrees
# with no other run, not even with the float64 run.
RECIPE = Recipe(
    name="imagenet_mobilenet_v2",
    network="mobilenet_v2",
    dataset="imagenet",
    optimizer=SGD(learning_rate=2**-14, momentum=0.9, weight_decay=1e-4),
    measurements=(*MEASUREMENTS, "step_breakdown", "time_to_accuracy"),
    acceptance=Acceptance(trajectory_steps=3),
    on_request=True,
    presets={
        "smoke": Preset(image_size=64, batch_size=8, classes=10, max_time_s=0.5),
        "standard": Preset(image_size=224, batch_size=32, classes=1000, max_time_s=20.0),
        "full": Preset(
            image_size=224,
            batch_size=96,
            classes=1000,
            optimizer=RMSProp(learning_rate=0.045, decay=0.9, momentum=0.9, epsilon=1.0, weight_decay=4e-5),
            max_time_s=60.0,
            training=Training(
                target=0.72,
                epochs=300,
                runs=3,
                time_limit_s=None,
                schedule=StepDecay(milestones=tuple(range(1, 300)), factor_each=0.98),
                source="Sandler et al., 'MobileNetV2' (CVPR 2018), table 4: 72.0% top-1; section 6.1: RMSProp, "
                "batch 96, rate 0.045 times 0.98 every epoch; the paper does not give the number of epochs",
            ),
        ),
        "reduced": Preset(
            image_size=64,
            batch_size=2,
            classes=10,
            max_time_s=0.5,
            note="for backends written to be read rather than to be fast",
        ),
    },
)
