"""Vision transformer ViT-B/16 on ImageNet."""

from d5suite.cases.recipe import MEASUREMENTS, Acceptance, Preset, Recipe, Training
from d5suite.optimizers.schedules import Cosine
from d5suite.optimizers.settings import AdamW

RECIPE = Recipe(
    name="imagenet_vit_b_16",
    network="vit_b_16",
    dataset="imagenet",
    optimizer=AdamW(learning_rate=2**-15, weight_decay=0.3, clip_norm=1.0),
    measurements=(*MEASUREMENTS, "step_breakdown", "time_to_accuracy"),
    label_smoothing=0.11,
    acceptance=Acceptance(trajectory_steps=3),
    on_request=True,
    presets={
        "smoke": Preset(image_size=48, batch_size=4, classes=10, max_time_s=0.5),
        "standard": Preset(
            image_size=224,
            batch_size=32,
            classes=1000,
            max_time_s=20.0,
            note="decay 0.3 and clipping at 1: Dosovitskiy et al. (ICLR 2021), table 3 and appendix B.1; the rate is "
            "near theirs times 32 / 4096",
        ),
        "full": Preset(
            image_size=224,
            batch_size=256,
            classes=1000,
            optimizer=AdamW(learning_rate=0.003, weight_decay=0.3, clip_norm=1.0),
            max_time_s=60.0,
            training=Training(
                target=0.746,
                epochs=300,
                runs=3,
                accumulate=16,
                time_limit_s=None,
                schedule=Cosine(epochs=300, warmup_epochs=30, warmup_start=0.033),
                source="Chen et al., 'When vision transformers outperform ResNets without pre-training or strong data "
                "augmentations' (ICLR 2022), table 2: 74.6% from crops and flips alone, batch 4096, 300 epochs",
            ),
            note="batch 4096, rate 0.003, decay 0.3, clipping at 1, 30 epochs of warm-up from 0.033 of the rate, "
            "cosine and label smoothing 0.11 are torchvision's reference (vit_b_16, references/classification); its "
            "mixup, CutMix, RandAugment, repeated augmentation and averaging, with which it has 81.07%, are left out",
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
