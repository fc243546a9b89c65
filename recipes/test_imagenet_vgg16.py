"""VGG-16 on ImageNet."""

from d5suite.cases.recipe import MEASUREMENTS, Acceptance, Preset, Recipe, Training
from d5suite.optimizers.schedules import StepDecay
from d5suite.optimizers.settings import SGD

# Few steps: a float64 copy of the weights takes a gigabyte, and a step makes several copies. 63 px
# is the largest size below 224 at which the last feature map can be pooled to the 7 x 7 of the
# first linear layer.
RECIPE = Recipe(
    name="imagenet_vgg16",
    network="vgg16",
    dataset="imagenet",
    optimizer=SGD(learning_rate=2**-8, momentum=0.9, weight_decay=1e-4),
    measurements=(*MEASUREMENTS, "step_breakdown", "time_to_accuracy"),
    acceptance=Acceptance(trajectory_steps=3),
    on_request=True,
    presets={
        "smoke": Preset(image_size=63, batch_size=8, classes=10, max_time_s=0.5),
        "standard": Preset(image_size=224, batch_size=16, classes=1000, max_time_s=20.0),
        "full": Preset(
            image_size=224,
            batch_size=256,
            classes=1000,
            optimizer=SGD(learning_rate=0.01, momentum=0.9, weight_decay=1e-4),
            max_time_s=60.0,
            training=Training(
                target=0.715,
                epochs=90,
                runs=3,
                time_limit_s=None,
                schedule=StepDecay(milestones=(30, 60)),
                source="torchvision's weights VGG16 IMAGENET1K_V1: 71.592% top-1; its reference training: batch 256, "
                "rate 0.01, a tenth every 30 epochs",
            ),
        ),
        "reduced": Preset(
            image_size=63,
            batch_size=2,
            classes=10,
            max_time_s=0.5,
            note="for backends written to be read rather than to be fast",
        ),
    },
)
