"""The tuning knobs of JAX, as data. Imports `d5suite.levels`."""

from d5suite.levels.knobs import MODE, TuningKnob, flag_knob, variable_knob

_DONATION = "JAX, Buffer donation (https://docs.jax.dev/en/latest/buffer_donation.html)"
_XLA = "xla/debug_options_flags.cc of OpenXLA"
_DISPATCH = "JAX, Asynchronous dispatch (https://docs.jax.dev/en/latest/async_dispatch.html)"

KNOBS = (
    TuningKnob(MODE, ("jit", "eager", "stock"), _DONATION),
    variable_knob("JAX_CPU_ENABLE_ASYNC_DISPATCH", ("false",), _DISPATCH),
    flag_knob("scheduler", "XLA_FLAGS", {"concurrent": "--xla_cpu_enable_concurrency_optimized_scheduler=true"}, _XLA),
    flag_knob(
        "vector-width", "XLA_FLAGS", {bits: f"--xla_cpu_prefer_vector_width={bits}" for bits in ("128", "512")}, _XLA
    ),
    flag_knob("eigen-threads", "XLA_FLAGS", {"off": "--xla_cpu_multi_thread_eigen=false"}, _XLA),
)
