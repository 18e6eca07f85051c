"""Undocumented names of torch, and of trainers, that graphsplit relies on, and why.

Each entry is looked up by ``tests/torch_contract`` under the torch that is installed: a release
that moves one fails the test of its name. ``docs/how-to/port-to-a-new-torch.md`` says what to do
then. Patches are entries too: what a block replaces has to be what torch looks up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PrivateName:
    """One name of torch that may move without notice.

    Attributes:
        path: Where it is: a module, and attributes of it, with dots between. A class in round
            brackets is an instance of it, made by the test.
        why: What graphsplit does with it.
    """

    path: str
    why: str


def _of(owner: str, why: str, *names: str) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(f"{owner}.{name}", why) for name in names)


CONTRACT: tuple[PrivateName, ...] = (
    # Fake tensors: torch/_subclasses/fake_tensor.py.
    *_of(
        "torch._subclasses.fake_tensor",
        "tells what capture runs on from what users hold, and runs a node once more without values",
        *("FakeTensor", "FakeTensorMode"),
    ),
    *_of(
        "torch._subclasses.fake_tensor",
        "what a fake tensor raises for lack of values: the signal that a part is kept whole",
        *("DataDependentOutputException", "DynamicOutputShapeException"),
    ),
    *_of(
        "torch._subclasses",
        "meta functions that refuse more than the kernels do are replaced (meta_functions.py)",
        "fake_impls",
    ),
    *_of(
        "torch._meta_registrations",
        "_grouped_mm takes dtypes on the CPU that its meta function refuses (meta_functions.py)",
        *("_meta_grouped_mm_common", "_create_grouped_mm_output_tensor"),
    ),
    # Loaders: torch/utils/data/dataloader.py.
    *_of(
        "torch.utils.data.DataLoader()",
        "whether processes that persist are there: the first epoch draws for their seed",
        *("_iterator", "_get_iterator"),
    ),
    *_of(
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter",
        "a later epoch begins; ends them where a run goes back to before they began",
        *("_reset", "_shutdown_workers"),
    ),
    # Operators and dispatch: torch/_ops.py, torch/utils/_python_dispatch.py.
    *_of(
        "torch._ops",
        "kinds of call_function targets in a recorded graph",
        *("OpOverload", "OperatorBase", "HigherOrderOperator"),
    ),
    *_of(
        "torch.ops.aten.add_.Tensor",
        "which operands an operator writes into, and what its form without a write is called",
        *("_schema", "_overloadname"),
    ),
    *_of(
        "torch._C",
        "whether an operator is a composite, whose parts autograd and autocast see",
        "_dispatch_has_kernel_for_dispatch_key",
    ),
    *_of(
        "torch._C",
        "whether fake tensors stand before the kernels at this point of a capture",
        *("_get_dispatch_mode", "_TorchDispatchModeKey.FAKE"),
    ),
    *_of(
        "torch.utils._python_dispatch",
        "sees each operator (TorchDispatchMode); leaves modes for a moment",
        *("TorchDispatchMode", "_disable_current_modes", "_pop_mode_temporarily"),
        "TorchDispatchMode.is_infra_mode",
    ),
    *_of(
        "torch.utils._python_dispatch",
        "tells tensors that hold others, which are recorded as these, from those of a user's class",
        "is_traceable_wrapper_subclass",
    ),
    *_of(
        "torch.fx.experimental.proxy_tensor",
        "a module that stands in two places is itself while it is recorded, and one whose call "
        "raises is left (eager_mode.py)",
        *("_ModuleStackTracer.getattr", "_ModuleStackTracer.path_of_module"),
        "_ModuleStackTracer.call_module",
        "PythonKeyTracer.getattr",
    ),
    *_of(
        "torch._C",
        "whether other modes of operators stand around those of an own loop",
        "_len_torch_dispatch_stack",
    ),
    *_of(
        "torch.overrides",
        "the user's own function modes stay active while ours are set aside (function_modes.py)",
        *("_get_current_function_mode_stack", "_push_mode", "_pop_mode"),
    ),
    *_of(
        "torch.utils._device",
        "a default device that the script enters is no mode that may do anything",
        "DeviceContext",
    ),
    *_of(
        "torch._C",
        "functions of torch without __torch_function__ of stand-ins, and how deep the modes are",
        *("DisableTorchFunction", "DisableTorchFunctionSubclass", "_len_torch_function_stack"),
        *("_disabled_torch_function_impl", "_is_torch_function_enabled"),
    ),
    *_of(
        "torch._C",
        "whether autocast is on anywhere, by one call at every step",
        "_is_any_autocast_enabled",
    ),
    *_of(
        "torch.Tensor",
        "a value of the script's own loop that is on another worker has a shape and no memory",
        "_make_wrapper_subclass",
    ),
    *_of("torch.utils._pytree", "takes values apart and puts them together", "tree_flatten"),
    # torch.export: torch/export/_trace.py, torch/_export/passes, torch/_higher_order_ops.
    *_of("torch.export._trace", "prints its failure; graphsplit's error says it instead", "sys"),
    *_of(
        "torch.fx._lazy_graph_module",
        "code of a graph that nobody runs is not made (exporting.py)",
        *("_use_lazy_graph_module", "_LazyGraphModule"),
    ),
    *_of(
        "torch",
        "left out of a capture, or looked for in its graph: nobody reads it (exporting.py)",
        "export.exported_program._create_graph_module_for_export",
        *("export._trace._replace_unbacked_bindings", "export._trace._ignore_backend_decomps"),
        *("export._trace._detect_attribute_assignment", "export._trace._override_builtin_ops"),
        "fx.experimental.proxy_tensor._extract_tensor_metadata",
        "fx._symbolic_trace._patch_wrapped_functions",
        *("_export.utils.insert_deferred_runtime_asserts", "_assert_scalar"),
    ),
    *_of(
        "torch._export.non_strict_utils",
        "max, min and math.pow while a step is recorded: for symbols alone (exporting.py)",
        *("_override_builtin_ops", "_tensor_min_max"),
    ),
    *_of(
        "torch._export.passes",
        "pack no_grad and autocast blocks into subgraphs; here the blocks' marks stay (regions.py)",
        "replace_set_grad_with_hop_pass.replace_set_grad_with_hop_pass",
        "replace_autocast_with_hop_pass.replace_autocast_with_hop_pass",
    ),
    *_of(
        "torch._higher_order_ops.utils",
        "where torch.cond sets up its own capture: reads are watched inside, too",
        "setup_compilation_env",
    ),
    *_of("torch._C", "the mark of a no_grad block in a recorded graph", "_set_grad_enabled"),
    *_of(
        "torch.amp.autocast_mode",
        "the marks of an autocast block in a recorded graph",
        *("_enter_autocast", "_exit_autocast"),
    ),
    *_of("torch", "validation in torch.distributions asks it (eager_mode.py)", "_is_all_true"),
    *_of(
        "torch.nn.modules.activation",
        "asks whether it is traced, and takes another kernel then (eager_mode.py)",
        "_is_make_fx_tracing",
    ),
    *_of(
        "torch",
        "nested tensors cannot be recorded; an encoder with padding goes its other way",
        *("_nested_tensor_from_mask_left_aligned", "_nested_tensor_from_mask"),
    ),
    *_of(
        "torch.utils.checkpoint",
        "a checkpoint is recorded, not kept whole (checkpoints.py)",
        *("_checkpoint_without_reentrant_generator", "_checkpoint_hook"),
    ),
    *_of(
        "torch._C._autograd",
        "whether operations of an own loop would be run once more by backward",
        "_top_saved_tensors_default_hooks",
    ),
    *_of(
        "torch._dynamo.source",
        "gives a lifted number a source, as an input of the graph has",
        "ConstantSource",
    ),
    *_of(
        "torch.fx.experimental.sym_node",
        "gives an operation the number that it takes, and says for whom (file)",
        *("SymNode", "SymNode.guard_float"),
    ),
    *_of(
        "torch.utils._sympy",
        "computes a size of a batch by the expression that export gives it",
        *("interp.sympy_interp", "reference.PythonReferenceAnalysis"),
    ),
    # Function transforms: torch/_functorch.
    *_of("torch._functorch.apis", "torch.vmap is kept whole", "vmap_impl"),
    *_of(
        "torch._functorch.eager_transforms",
        "transforms of torch.func are kept whole, or refused",
        *("grad_impl", "grad_and_value_impl", "_jvp_with_argnums", "_vjp_with_argnums"),
    ),
    *_of(
        "torch._C",
        "an autograd.Function inside a transform is the transform's",
        "_are_functorch_transforms_active",
    ),
    # Autograd: torch/autograd.
    *_of(
        "torch.autograd.Variable._execution_engine",
        "backward of a part, without the checks that cost more than a small layer",
        "run_backward",
    ),
    *_of(
        "torch.autograd.function",
        "apply of a user's Function, before functorch's own",
        "_SingleLevelFunction",
    ),
    # Modules: torch/nn/modules/module.py.
    *_of(
        "torch.nn.Module()",
        "tables of a module, watched and put in place of each other",
        *("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"),
    ),
    *_of(
        "torch.nn.Module()",
        "hooks of a module, watched",
        *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    ),
    *_of(
        "torch.nn.Module()",
        "whether a network has code of its own for its state",
        *("_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
        *("_save_to_state_dict", "_load_from_state_dict"),
    ),
    *_of(
        "torch.nn.modules.module",
        "hooks of all modules, watched",
        *("_global_forward_hooks", "_global_forward_pre_hooks"),
        *("_global_backward_hooks", "_global_backward_pre_hooks"),
    ),
    *_of(
        "torch.nn.Module",
        "the call of a module: its frame names the module that failed; conversions inside forward",
        *("_call_impl", "_apply"),
    ),
    *_of("torch.nn.Module().state_dict()", "versions of modules in a state", "_metadata"),
    *_of(
        "torch.nn.modules.module",
        "the key under which what `get_extra_state` returns is kept",
        "_EXTRA_STATE_KEY_SUFFIX",
    ),
    *_of(
        "torch.nn.modules.batchnorm._BatchNorm",
        "a norm without a momentum asks for its counter, and is recorded in parts",
        *("forward", "_check_input_dim"),
    ),
    *_of("torch.nn.LSTM()", "attributes in which its weights stand once more", "_flat_weights"),
    # Tensors and storages: torch/_tensor.py, torch/csrc.
    PrivateName(
        "torch._has_compatible_shallow_copy_type",
        "what a conversion of a module asks of a tensor, which a stand-in may answer",
    ),
    *_of(
        "torch.empty()",
        "tensors that are watched or that stand in: writes, views, hooks",
        *("_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks"),
    ),
    *_of("torch.empty().untyped_storage()", "which tensors share memory", "_cdata"),
    *_of("torch.autograd.graph.Node", "in which order backward comes to steps", "_sequence_nr"),
    *_of(
        "torch.empty().untyped_storage()",
        "deferred construction fills memory in place",
        "_swap_data_ptr_",
    ),
    *_of(
        "torch._C",
        "deferred construction: tensors without memory that fail when it is touched",
        *("TensorBase", "_has_storage", "_storage_Use_Count"),
        *("_construct_storage_from_data_pointer", "_set_throw_on_mutable_data_ptr"),
    ),
    *_of("torch", "many tensors in one call", "_foreach_copy_", "_foreach_norm"),
    *_of(
        "torch",
        "averages that scripts keep of what lives elsewhere",
        *("_foreach_add_", "_foreach_div_", "_foreach_lerp_", "_foreach_mul_", "_foreach_sub_"),
    ),
    *_of("torch._C._dynamo.guards", "whether a dictionary was written to", "dict_version"),
    # Scripted modules.
    *_of(
        "torch._C",
        "what TorchScript made is kept whole",
        *("ScriptFunction", "ScriptMethod", "ScriptModule"),
    ),
    *_of("torch.jit.script()", "what stands behind a scripted module", "_c"),
    *_of(
        "torch.jit.script()._c",
        "which attributes the code of a scripted module names",
        *("_get_method", "_method_names"),
    ),
    *_of(
        "torch.fx.proxy",
        "operations of a loss that is a function have its lines: forward's alone are kept",
        "_STACK_TRACE_ANCHORS",
    ),
    *_of(
        "torch.fx.proxy",
        "which lines an operation comes of: looked for among the frames of forward alone",
        "CapturedTraceback",
    ),
    # Generated code: torch/fx/graph_module.py.
    *_of("torch.fx.GraphModule()", "which line of its code runs which node", "_lineno_map"),
    *_of("torch.fx.graph_module", "keeps sources, of what is gone as well", "_loader.eval_cache"),
    *_of("torch.sparse()", "the parts as they are, not coalesced", "_indices", "_values"),
    # Optimizers and clipping: torch/optim, torch/nn/utils/clip_grad.py.
    *_of(
        "torch.utils._foreach_utils",
        "the order in which clip_grad_norm_ adds",
        *("_group_tensors_by_device_and_dtype", "_has_foreach_support"),
    ),
    *_of(
        "torch.utils._foreach_utils",
        "on which devices an optimizer steps many parameters in one kernel",
        "_get_foreach_kernels_supported_devices",
    ),
    *_of(
        "torch.nn.utils.clip_grad",
        "clip_grad_norm_ asks these, by these names: a part of the norm is refused there",
        *("_get_total_norm", "_group_tensors_by_device_and_dtype"),
    ),
    *_of(
        "torch.optim.optimizer",
        "hooks of all optimizers: are they per parameter?",
        *("_global_optimizer_pre_hooks", "_global_optimizer_post_hooks"),
    ),
    *_of(
        "torch.optim.SGD()",
        "hooks of one optimizer",
        *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
        *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
        *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
    ),
    *_of(
        "torch.amp.GradScaler()",
        "whether one optimizer's gradients are finite; a loaded scale counts from its tracker",
        *("_per_optimizer_states", "_growth_tracker"),
    ),
    *_of(
        "torch.optim.SGD()",
        "a scheduler notes here that a step was taken, and warns if there was none",
        "_opt_called",
    ),
    *_of(
        "torch.optim.adam",
        "optimizers that ask it step a whole group in one kernel on a GPU",
        "_default_to_fused_or_foreach",
    ),
    # Switches: torch/csrc/Module.cpp.
    *(
        PrivateName(f"torch._C._get_{name}", "chooses a kernel: watched while capture runs")
        for name in (
            *("math_sdp_enabled", "flash_sdp_enabled", "mem_efficient_sdp_enabled"),
            *("cudnn_sdp_enabled", "sdp_priority_order", "float32_matmul_precision"),
            *("mkldnn_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic"),
            *("deterministic_algorithms", "cublas_allow_tf32", "cudnn_allow_tf32"),
        )
    ),
    *_of("torch._C", "whether autograd runs, and a hook with it", "_current_graph_task_id"),
    *_of("torch", "on a GPU, sets the order of attention's kernels once", "_fused_sdp_choice"),
    *_of("torch.library", "which kernels Python has put in: others answer otherwise", "_impls"),
    # Functions that look at values between steps: torch/nn/utils/prune.py, parametrize.py,
    # parametrizations.py, weight_norm.py, spectral_norm.py, torch/optim/swa_utils.py.
    *_of(
        "torch.nn.utils.prune",
        "its code is replaced: values that live elsewhere are brought first (replaced.py)",
        *("identity", "random_unstructured", "l1_unstructured", "random_structured"),
        *("ln_structured", "global_unstructured", "custom_from_mask", "remove"),
    ),
    *_of(
        "torch.nn.utils.parametrize",
        "its code is replaced likewise",
        *("register_parametrization", "remove_parametrizations"),
        "transfer_parametrizations_and_params",
    ),
    *_of(
        "torch.nn.utils.parametrizations",
        "its code is replaced likewise",
        *("orthogonal", "weight_norm", "spectral_norm"),
    ),
    *_of(
        "torch.nn.utils",
        "its code is replaced likewise",
        *("weight_norm", "remove_weight_norm", "spectral_norm", "remove_spectral_norm"),
    ),
    *_of("torch.optim.swa_utils", "likewise", "AveragedModel.update_parameters"),
    # torch/nn/init.py.
    *_of(
        "torch.nn.init",
        "its code is replaced: a stand-in is filled by its form (replaced.py)",
        *("trunc_normal_", "eye_", "dirac_"),
    ),
    # The compiler and the process groups.
    *_of("torch._inductor", "what Model(compile={'mode': ...}) stands for", "list_mode_options"),
    *_of(
        "torch.distributed.ProcessGroupGloo",
        "a group of two workers, made without the default group (transport/torch)",
        *("_Options", "create_device"),
    ),
    # transformers, if it is there: src/transformers/utils/import_utils.py.
    *_of(
        "transformers.utils.import_utils",
        "leaves a mask out where it can look into it: fake tensors with known values say so",
        "is_fake_tensor",
    ),
    # accelerate, if it is there: src/accelerate/state.py.
    *_of(
        "accelerate.state",
        "which process accelerate takes this one for: it is told the worker's rank",
        *("PartialState._shared_state", "AcceleratorState._shared_state"),
    ),
    # torchmetrics, if it is there: src/torchmetrics/metric.py.
    *_of(
        "torchmetrics.SumMetric()",
        "what a metric gave last, which Lightning's progress bar shows on one worker",
        "_forward_cache",
    ),
)
