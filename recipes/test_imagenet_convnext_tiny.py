"""ConvNeXt-Tiny on ImageNet."""

from d5suite.cases.recipe import MEASUREMENTS, Acceptance, Preset, Recipe, Training
from d5suite.optimizers.schedules import Cosine
from d5suite.optimizers.settings import AdamW

RECIPE = Recipe(
    name="imagenet_convnext_tiny",
    network="convnext_tiny",
    dataset="imagenet",
    optimizer=AdamW(learning_rate=2**-15, weight_decay=0.05),
    measurements=(*MEASUREMENTS, "step_breakdown", "time_to_accuracy"),
    label_smoothing=0.1,
    acceptance=Acceptance(trajectory_steps=3),
    on_request=True,
    presets={
        "smoke": Preset(image_size=64, batch_size=4, classes=10, max_time_s=0.5),
        "standard": Preset(
            image_size=224,
            batch_size=32,
            classes=1000,
            max_time_s=20.0,
            note="decay 0.05: Liu et al. (CVPR 2022), table 5; their rate times 32 / 4096",
        ),
        "full": Preset(
            image_size=224,
            batch_size=256,
            classes=1000,
            optimizer=AdamW(learning_rate=0.004, weight_decay=0.05),
            max_time_s=60.0,
            training=Training(
                target=0.821,
                epochs=300,
                runs=3,
                accumulate=16,
                time_limit_s=None,
                schedule=Cosine(epochs=300, warmup_epochs=20),
                source="Liu et al., 'A ConvNet for the 2020s' (CVPR 2022), tables 1 and 5: 82.1%, batch 4096, 300 "
                "epochs, rate 0.004, decay 0.05, 20 epochs of warm-up, cosine, label smoothing 0.1; with stochastic "
                "depth, mixup, CutMix, RandAugment, random erasing and weight averaging, which d5suite does not have: "
                "no result without them is published",
            ),
        ),
        "reduced": Preset(
            image_size=32,
            batch_size=2,
            classes=10,
            max_time_s=0.5,
            note="for backends written to be read rather than to be fast",
        ),
    },
)
