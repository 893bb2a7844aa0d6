"""Tests that every place of JAX that knows platform conditionals is known here.

A place is a table with an entry for `cond_p` or `platform_index_p`, or a
function that names one of them. It is replaced by the package, or it is listed
below with the reason why it needs no replacement; a new JAX can't add one
unseen.
"""
import ast
import importlib
import inspect
import pathlib
import sys
import types
from unittest import mock

from absl.testing import absltest
import jax
from jax._src import config
from jax._src import test_util as jtu

from jax_cond_patch import activation
from jax_cond_patch.compat import internals
import jcp_test_util as tu

config.parse_flags_with_absl()

PRIMITIVES = dict(
    cond_p=internals.cond_p, platform_index_p=internals.platform_index_p)

# What registers rules and is not imported with JAX.
MODULES = (
    "jax._src.pallas.fuser", "jax._src.pallas.fuser.fusable_dtype",
    "jax._src.pallas.fuser.fusible_dtype",
    "jax._src.pallas.hlo_interpreter", "jax._src.pallas.mosaic.lowering",
    "jax._src.pallas.mosaic_gpu.lowering", "jax._src.pallas.triton.lowering",
    "jax.experimental.checkify", "jax.experimental.jet",
    "jax.experimental.key_reuse._core", "jax.experimental.pallas",
    "jax.experimental.pallas.mosaic_gpu", "jax.experimental.pallas.tpu",
    "jax.experimental.pallas.triton", "jax.experimental.roofline.roofline",
    "jax.experimental.shard_map", "jax.experimental.sparse",
)

IN_A_KERNEL = ("a kernel is resolved before it is lowered or interpreted, and "
               "has no platform conditionals any more")
TAKES_ANY_PARAMS = "takes any params, and binds with all"
KEEPS_PARAMS = "gets the equation, and keeps its params"
ONLY_BRANCHES = "looks at the branches only, whatever the other params are"
NO_BRANCHES = "does not look into the branches"
LOWERED = ("a platform conditional is resolved before it is lowered; without "
           "platforms it is an ordinary one")
NEVER_WITH_REFS = "an assertion, which looks at no params"

SAFE_TABLES = {
    ("jax._src.core.axis_substitution_rules", "cond_p"): KEEPS_PARAMS,
    ("jax._src.core.custom_typechecks", "cond_p"): TAKES_ANY_PARAMS,
    ("jax._src.interpreters.batching.ragged_prop_rules", "cond_p"):
        NEVER_WITH_REFS,
    ("jax._src.interpreters.mlir._lowerings", "cond_p"): LOWERED,
    ("jax._src.interpreters.mlir._lowerings", "platform_index_p"):
        "lowers an index that no platform conditional uses",
    ("jax._src.interpreters.partial_eval.dce_rules", "cond_p"): KEEPS_PARAMS,
    ("jax._src.interpreters.pxla._initial_style_primitives", "cond_p"):
        NO_BRANCHES,
    ("jax._src.interpreters.xla._initial_style_primitives", "cond_p"):
        NO_BRANCHES,
    ("jax._src.interpreters.xla.initial_style_primitives", "cond_p"):
        NO_BRANCHES,
    ("jax._src.pallas.fuser.custom_evaluate.disallowed_primitives", "cond_p"):
        "refuses all conditionals",
    **{(f"jax._src.pallas.fuser.{module}._physicalize_rules", "cond_p"):
       TAKES_ANY_PARAMS for module in ("fusable_dtype", "fusible_dtype")},
    ("jax._src.pallas.hlo_interpreter._eval_jaxpr_hop_rules", "cond_p"):
        KEEPS_PARAMS,
    ("jax._src.pallas.mosaic.lowering.lowering_rules", "cond_p"): IN_A_KERNEL,
    ("jax._src.pallas.mosaic.lowering.lowering_rules", "platform_index_p"):
        IN_A_KERNEL,
    ("jax._src.pallas.mosaic.lowering._uncacheable_primitives", "cond_p"):
        IN_A_KERNEL,
    ("jax._src.pallas.mosaic_gpu.lowering._resource_estimators", "cond_p"):
        IN_A_KERNEL,
    ("jax._src.pallas.mosaic_gpu.lowering.mosaic_lowering_rules", "cond_p"):
        IN_A_KERNEL,
    ("jax._src.pallas.triton.lowering.triton_lowering_rules", "cond_p"):
        IN_A_KERNEL,
    ("jax.experimental.key_reuse._core.key_reuse_signatures", "cond_p"):
        ONLY_BRANCHES,
    **{(f"jax.experimental.key_reuse.{module}.key_reuse_signatures_dynamic",
        "cond_p"): ONLY_BRANCHES
       for module in ("_core", "_forwarding", "_simple")},
    ("jax.experimental.roofline.roofline._rooflines", "cond_p"): NO_BRANCHES,
    ("jax.experimental.roofline.roofline._rooflines", "platform_index_p"):
        NO_BRANCHES,
    ("jax.experimental.shard_map._check_rules", "platform_index_p"):
        "an index has no replication but that of all devices",
    ("jax.experimental.shard_map._rewrite_rules", "platform_index_p"):
        "an index has no replication but that of all devices",
    ("jax.experimental.sparse.transform.sparse_rules_bcoo", "cond_p"):
        TAKES_ANY_PARAMS,
}

REGISTERED = "it is the rule of a table"
MAKES_ORDINARY_CONDITIONALS = "makes ordinary conditionals"

SAFE_FUNCTIONS = {
    ("_src/checkify.py", "cond_error_check"): REGISTERED,
    **{("_src/lax/control_flow/conditionals.py", function): REGISTERED
       for function in (
           "_cond_batching_rule", "_cond_jvp", "_cond_linearize",
           "_cond_partial_eval", "_cond_partial_eval_custom", "_cond_remat",
           "_cond_state_discharge_rule", "_cond_to_lojax", "_cond_transpose",
           "_cond_transpose_fancy", "_cond_typecheck")},
    ("_src/lax/control_flow/conditionals.py", "cond_bind"):
        "it is `cond_p.bind`, which is replaced",
    ("_src/lax/control_flow/conditionals.py", "_cond"):
        MAKES_ORDINARY_CONDITIONALS,
    ("_src/lax/control_flow/conditionals.py", "cond"):
        MAKES_ORDINARY_CONDITIONALS,
    ("_src/lax/control_flow/conditionals.py", "switch"):
        MAKES_ORDINARY_CONDITIONALS,
    ("_src/lax/control_flow/conditionals.py", "_switch_internal"):
        "binds with the platforms that it gets",
    ("_src/lax/control_flow/conditionals.py", "platform_dependent"):
        "its code is replaced",
    **{(f"_src/pallas/fuser/{module}.py", "_cond_physicalize_rule"): REGISTERED
       for module in ("fusable_dtype", "fusible_dtype")},
    ("_src/pallas/mosaic/interpret.py", "_interpret_jaxpr"): IN_A_KERNEL,
    ("_src/pallas/mosaic/interpret/interpret_pallas_call.py",
     "_interpret_jaxpr"): IN_A_KERNEL,
    ("_src/pallas/mosaic_gpu/interpret/jaxpr_interpret.py",
     "JaxprInterpreter"): IN_A_KERNEL,
    ("_src/pallas/triton/lowering.py", ""): IN_A_KERNEL,
    ("_src/thunky/thunky.py", ""): "has another `cond_p`",
    ("_src/thunky/thunky.py", "switch"): "has another `cond_p`",
    ("experimental/host_callback.py", "_rewrite_eqn"): KEEPS_PARAMS,
    ("experimental/jax2tf/jax2tf.py", ""):
        "converts through an export; to a graph it has other "
        "`bind_with_trace`s, which see only the branch that runs",
    ("experimental/shard_map.py", "_cond_rewrite"): REGISTERED,
    ("experimental/sparse/transform.py", "_cond_sparse"): REGISTERED,
}

# Attributes of the primitives themselves.
SAFE_ATTRIBUTES = {
    ("cond_p", "abstract_eval"): TAKES_ANY_PARAMS,
    ("cond_p", "impl"): "compiles the equation like any other",
    ("cond_p", "is_high"): TAKES_ANY_PARAMS,
    ("cond_p", "to_lojax"): TAKES_ANY_PARAMS,
    ("platform_index_p", "abstract_eval"): TAKES_ANY_PARAMS,
    ("platform_index_p", "impl"): "compiles the equation like any other",
}


def has_key(x, primitive):
  try:
    return primitive in x
  except Exception:  # not every container takes every key
    return False


def tables():
  """Yields the name, the table and the primitive of each entry."""
  seen = set()

  def walk(name, x, depth):
    for primitive_name, primitive in PRIMITIVES.items():
      if (isinstance(x, (dict, set, frozenset)) and has_key(x, primitive) and
          (id(x), primitive_name) not in seen):
        seen.add((id(x), primitive_name))
        yield name, x, primitive_name
    # Tables of rules may stand in a table, by the kind of kernel.
    if isinstance(x, dict) and depth == 0:
      for inner in list(x.values()):
        yield from walk(name, inner, depth + 1)

  # The modules of the implementation first, whose tables others import.
  for module in sorted(m for m in sys.modules if m.split(".")[0] == "jax"):
    for name, x in list(vars(sys.modules[module]).items()):
      if not name.startswith("__"):
        yield from walk(f"{module}.{name}", x, 0)


class _Functions(ast.NodeVisitor):
  """Finds the functions and classes of a file that name a primitive."""

  def __init__(self):
    self.outermost = ""
    self.found = set()

  def visit_definition(self, node):
    if self.outermost:
      self.generic_visit(node)
      return
    for decorator in node.decorator_list:  # a registration
      self.visit(decorator)
    self.outermost = node.name
    for child in node.body:
      self.visit(child)
    self.outermost = ""

  visit_FunctionDef = visit_ClassDef = visit_definition

  def visit_Name(self, node):
    if node.id in PRIMITIVES:
      self.found.add(self.outermost)

  def visit_Attribute(self, node):
    if node.attr in PRIMITIVES:
      self.found.add(self.outermost)
    self.generic_visit(node)


def functions():
  """Yields the file and the name of each; "" for code of a module itself."""
  root = pathlib.Path(jax.__file__).parent
  for path in sorted(root.rglob("*.py")):
    text = path.read_text()
    if any(name in text for name in PRIMITIVES):
      visitor = _Functions()
      visitor.visit(ast.parse(text))
      for function in sorted(visitor.found):
        yield path.relative_to(root).as_posix(), function


class CompletenessTest(tu.JcpTestCase):

  @classmethod
  def setUpClass(cls):
    super().setUpClass()
    for module in MODULES:
      try:
        importlib.import_module(module)
      except ImportError:
        pass  # not in this JAX
    cls.tables = list(tables())
    cls.replaced = [r.place for r in activation.table()]

  def is_replaced(self, table, primitive_name):
    return any(isinstance(place, activation.Item) and place.table is table and
               place.key is PRIMITIVES[primitive_name]
               for place in self.replaced)

  def test_tables(self):
    self.assertIn(("jax._src.checkify.error_checks", "cond_p"),
                  [(name, primitive) for name, _, primitive in self.tables])
    unknown = [(name, primitive) for name, table, primitive in self.tables
               if not self.is_replaced(table, primitive) and
               (name, primitive) not in SAFE_TABLES]
    self.assertEmpty(unknown, "neither replaced nor listed as safe")

  def test_new_table(self):
    module = types.ModuleType("jax._src.new")
    module.rules = {"kind": {internals.cond_p: lambda x, *, branches: x}}
    with mock.patch.dict(sys.modules, {"jax._src.new": module}):
      self.assertIn(("jax._src.new.rules", "cond_p"),
                    [(name, primitive) for name, _, primitive in tables()])

  def test_undone_after_all_else_is_imported(self):
    """None of JAX's modules puts anything over a replacement."""
    # Some of the inner ones can't be imported before an outer one.
    modules = sorted(MODULES, key=lambda name: name.startswith("jax._src"))
    result = tu.run_python(f"""
        import contextlib
        import importlib
        import jax_cond_patch
        for module in {modules}:
          with contextlib.suppress(ImportError):
            importlib.import_module(module)
        jax_cond_patch.deactivate()
        """, PYTHONPATH=tu.python_path())
    self.assertEqual(result.returncode, 0, result.stderr)

  def test_what_takes_any_params(self):
    """Since it is listed as safe for that reason."""
    rules = [(name, table[PRIMITIVES[primitive]])
             for name, table, primitive in self.tables
             if not self.is_replaced(table, primitive) and
             SAFE_TABLES[name, primitive].startswith(TAKES_ANY_PARAMS)]
    self.assertNotEmpty(rules)
    for name, rule in rules:
      kinds = [p.kind for p in inspect.signature(rule).parameters.values()]
      self.assertIn(inspect.Parameter.VAR_KEYWORD, kinds, name)

  def is_item_replaced(self, table, key):
    return any(isinstance(place, activation.Item) and place.table is table and
               place.key == key for place in self.replaced)

  def test_attributes(self):
    replaced = [(place.holder, place.name) for place in self.replaced
                if isinstance(place, activation.Attribute)]
    unknown = []
    for primitive_name, primitive in PRIMITIVES.items():
      for name, value in vars(primitive).items():
        if (callable(value) and (primitive, name) not in replaced and
            not self.is_item_replaced(vars(primitive), name) and
            (primitive_name, name) not in SAFE_ATTRIBUTES):
          unknown.append((primitive_name, name))
    self.assertEmpty(unknown, "neither replaced nor listed as safe")

  def test_functions(self):
    with_table = {sys.modules[name].__file__ for name in sys.modules
                  if any(t.rpartition(".")[0] == name
                         for t, _, _ in self.tables)}
    found = list(functions())
    self.assertIn(("_src/checkify.py", "cond_error_check"), found)
    unknown = [
        (path, function) for path, function in found
        if (path, function) not in SAFE_FUNCTIONS and
        # Code of a module registers rules, and these have been looked at.
        not (function == "" and (path.endswith("conditionals.py") or any(
            file and file.endswith("/jax/" + path) for file in with_table)))]
    self.assertEmpty(unknown, "neither replaced nor listed as safe")


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
