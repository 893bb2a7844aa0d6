"""Lowers only what the lowering platforms reach, each part for its own.

Four places of JAX are replaced. `pxla.lower_sharding_computation` resolves a
whole program before anything is derived from it, and `mlir.jaxpr_subcomp` what
is traced later, while lowering. `platform_case` is the lowering of a
platform conditional with several owners. `mlir.lower_per_platform` hands each
rule a context in which everything speaks of the platforms of that rule alone.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import inspect
import logging

from jax._src import core
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir
from jax._src.lib.mlir.dialects import hlo

from jax_cond_patch import resolution
from jax_cond_patch.compat import internals

_logger = logging.getLogger("jax_cond_patch")


def lower_sharding_computation(original: Callable) -> Callable:
  """Makes `pxla.lower_sharding_computation` lower a resolved program."""
  signature = inspect.signature(original)

  def lower_resolved(closed_jaxpr, *args, **kwargs):
    if not resolution.is_resolvable(closed_jaxpr, resolution.Scope.PROGRAM):
      return original(closed_jaxpr, *args, **kwargs)
    jaxpr = internals.open_jaxpr(closed_jaxpr)
    bound = signature.bind(closed_jaxpr, *args, **kwargs)
    arguments = bound.arguments
    requested = internals.requested_platforms(arguments)
    jax_drops_dead = internals.drops_dead(arguments, jaxpr)

    def lower(platforms):
      _logger.debug("lowering %s for %s", arguments["fun_name"],
                    ", ".join(platforms))
      resolved = resolution.resolve(
          closed_jaxpr, platforms, resolution.Scope.PROGRAM,
          drop_dead=not jax_drops_dead)
      if jax_drops_dead:
        # JAX's own search for what is dead takes longer.
        arguments["keep_unused"] = resolution.is_all_alive(resolved)
      try:
        return original(resolved, *bound.args[1:], **bound.kwargs)
      finally:
        internals.forget_dead_code_search(resolved)

    if requested is not None:
      return lower(requested)
    platforms = (internals.lowering_platform(arguments, jaxpr),)
    computation = lower(platforms)
    found = internals.computation_platforms(computation)
    if found != platforms:
      # JAX has found other devices than were found here; its word counts.
      computation = lower(found)
    return computation

  return lower_resolved


def jaxpr_subcomp(original: Callable) -> Callable:
  """Makes `mlir.jaxpr_subcomp` resolve the equations that it lowers."""
  def resolved_jaxpr_subcomp(ctx, jaxpr, *args, dim_var_values, **kwargs):
    jaxpr = resolution.resolve(
        jaxpr, ctx.platforms, resolution.Scope.EQUATIONS)
    return original(
        ctx, jaxpr, *args,
        dim_var_values=internals.visible_dim_var_values(dim_var_values),
        **kwargs)

  return resolved_jaxpr_subcomp


def lower_per_platform(original: Callable) -> Callable:
  """Makes `mlir.lower_per_platform` narrow all of a rule's context.

  It narrows `ctx.platforms` alone, and nothing in a `compute_on` region. What
  is lowered inside then reads the module's platform index against the narrowed
  list, and shares the lowerings of jitted functions with code for other
  platforms: wrong numbers.
  """
  def narrowing(rule, platforms):
    def narrowed_rule(ctx, *args, **kwargs):
      # JAX says in `ctx.platforms` for which of the platforms a rule is, since
      # 0.4.30: https://github.com/jax-ml/jax/commit/97db0e758d.
      names = (internals.platforms_for_eqn_ctx(
          getattr(ctx, "jaxpr_eqn_ctx", None)) or
               getattr(ctx, "platforms", platforms) or
               ctx.module_context.platforms)
      inner_ctx = narrow(ctx, tuple(names))
      outputs = rule(inner_ctx, *args, **kwargs)
      if inner_ctx is not ctx:
        erase_if_unused(inner_ctx.dim_var_values, ctx.dim_var_values)
        if inner_ctx.tokens_out is not None:
          ctx.set_tokens_out(inner_ctx.tokens_out)
      return outputs
    return narrowed_rule

  def lower_per_narrowed_platform(ctx, description, platform_rules,
                                  default_rule, effects, *args, **kwargs):
    platforms = ctx.module_context.platforms
    if len(platforms) > 1:
      without_rule = tuple(p for p in platforms if p not in platform_rules)
      platform_rules = {p: narrowing(r, (p,))
                        for p, r in platform_rules.items()}
      default_rule = default_rule and narrowing(default_rule, without_rule)
    return original(ctx, description, platform_rules, default_rule, effects,
                    *args, **kwargs)

  return lower_per_narrowed_platform


_NARROWED_LOWERINGS = "jax_cond_patch narrowed lowerings"


def narrow(ctx: mlir.LoweringRuleContext, platforms: tuple[str, ...]
           ) -> mlir.LoweringRuleContext:
  """Returns a context in which only some of the platforms are lowered for.

  Args:
    ctx: the context of a rule.
    platforms: some of the platforms of its module context, or a single one: a
      `compute_on` region is for the host, whether or not the module is.

  Returns:
    A context whose module context has these platforms, whose platform index
    counts them, and whose cache of lowered functions is that of these platforms
    in the module. `ctx` itself if these are all.
  """
  module_context = ctx.module_context
  if tuple(module_context.platforms) == platforms:
    return ctx
  # The keys of this cache hold no platforms, so each set of them has its own.
  # A function that is the same for all platforms is lowered for each set, too:
  # only its lowering rules know whether it is, and they may trace anything.
  lowerings = module_context.cached_primitive_lowerings
  narrowed = lowerings.setdefault(_NARROWED_LOWERINGS, {})
  cache = narrowed.setdefault(platforms, {_NARROWED_LOWERINGS: narrowed})
  dim_var_values = ctx.dim_var_values
  if len(platforms) > 1:
    module_index, *dim_vars = dim_var_values
    positions = [platforms.index(p) if p in platforms else 0
                 for p in module_context.platforms]
    dim_var_values = (_select_constant(module_index, positions), *dim_vars)
  ctx = ctx.replace(
      module_context=module_context.replace(
          platforms=platforms, cached_primitive_lowerings=cache),
      dim_var_values=dim_var_values)
  return ctx.replace(platforms=None) if hasattr(ctx, "platforms") else ctx


def erase_if_unused(dim_var_values: Sequence[ir.Value],
                    module_dim_var_values: Sequence[ir.Value]) -> None:
  """Erases the operations of a narrowed platform index that nothing used."""
  if not dim_var_values or dim_var_values[0] is module_dim_var_values[0]:
    return
  unused = [dim_var_values[0]]
  while unused:
    value = unused.pop()
    if (value == module_dim_var_values[0] or
        isinstance(value.owner, ir.Block) or next(iter(value.uses), None)):
      continue
    operands = list(value.owner.operands)
    value.owner.erase()
    unused.extend(operands)


def _select_constant(index: ir.Value, constants: Sequence[int]) -> ir.Value:
  """Emits `constants[index]`, of the type of `index`.

  By comparisons, so that a module has one `case` for each conditional.
  """
  if list(constants) == list(range(len(constants))):
    return index
  i32_index = internals.convert_integer(index, internals.i32_type())
  # The constant that most positions have needs no comparison.
  default = max(sorted(set(constants)), key=list(constants).count)
  selected = internals.i32_constant(default)
  for position, constant in enumerate(constants):
    if constant != default:
      is_here = mlir.compare_hlo(
          i32_index, internals.i32_constant(position), "EQ", "SIGNED")
      selected = hlo.select(is_here, internals.i32_constant(constant), selected)
  return internals.convert_integer(selected, index.type)


def platform_case_lowering(ctx: mlir.LoweringRuleContext, *args,
                           branches: Sequence,
                           platforms: tuple[tuple[str, ...], ...]):
  """Emits a `case` on the module's platform index, an arm for each branch."""
  effects = internals.ordered_effects(
      core.join_effects(*(branch.effects for branch in branches)))
  tokens_in = ctx.tokens_in.subset(effects)
  types, unflatten = internals.flat_ir_types(
      ctx.module_context, [core.abstract_token] * len(effects) + list(
          ctx.avals_out))
  owners = [next(b for b, names in enumerate(platforms) if platform in names)
            for platform in ctx.module_context.platforms]
  index = internals.convert_integer(
      _select_constant(ctx.dim_var_values[0], owners), internals.i32_type())
  case_op = hlo.CaseOp(types, index=index, num_branches=len(branches))
  for region, branch, owned in zip(case_op.regions, branches, platforms):
    with ir.InsertionPoint(region.blocks.append()):
      branch_ctx = narrow(ctx, owned)
      outs, tokens = internals.lower_jaxpr_inline(
          branch_ctx, branch, tokens_in, *args)
      erase_if_unused(branch_ctx.dim_var_values, ctx.dim_var_values)
      hlo.return_(internals.flat_ir_values(
          [*(tokens.get(effect) for effect in effects), *outs]))
  results = list(unflatten(case_op.results))
  tokens, outs = results[:len(effects)], results[len(effects):]
  ctx.set_tokens_out(ctx.tokens_in.update_tokens(
      internals.token_set(dict(zip(effects, tokens)))))
  return internals.with_sharding_in_types(ctx, outs, ctx.avals_out)
