"""Your own network: any ONNX file, on every backend, with inputs drawn at random.

pytest recipes/test_your_network.py --network model.onnx --shape input=8x3x224x224
"""

from d5suite.cases.recipe import Acceptance, Preset
from d5suite.cases.user_network import UserNetworkRecipe
from d5suite.optimizers.settings import SGD

# The network's file determines images and classes. The rate is low, because the right rate is not
# known.
RECIPE = UserNetworkRecipe(
    name="your_network",
    network="",
    dataset="inputs",
    optimizer=SGD(learning_rate=2**-10, momentum=0.9),
    measurements=("inference", "gradient", "training_step"),
    acceptance=Acceptance(trajectory_steps=4),
    presets={
        "smoke": Preset(image_size=0, batch_size=8, classes=0, max_time_s=1.0),
        "standard": Preset(image_size=0, batch_size=32, classes=0, max_time_s=10.0),
        "full": Preset(image_size=0, batch_size=128, classes=0, max_time_s=60.0),
        "reduced": Preset(
            image_size=0,
            batch_size=2,
            classes=0,
            max_time_s=0.5,
            note="for backends written to be read rather than to be fast",
        ),
    },
)
