"""Tests of several processes, and of compilations that these share."""
import os
import socket
import subprocess
import sys
import tempfile
import textwrap
import threading

from absl.testing import absltest
from jax._src import config
from jax._src import test_util as jtu

import jcp_test_util as tu

config.parse_flags_with_absl()

TRAINING = """
    import hashlib, sys
    import jax, jax_cond_patch
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax.experimental import multihost_utils
    from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

    address, process = sys.argv[1], int(sys.argv[2])
    try:
      jax.config.update("jax_cpu_collectives_implementation", "gloo")
    except AttributeError:  # up to JAX 0.4.26
      jax.config.update("jax_cpu_enable_gloo_collectives", True)
    jax.distributed.initialize(address, 2, process)
    assert jax.process_count() == 2 and jax.device_count() == 2
    mesh = Mesh(np.array(jax.devices()), ("i",))
    rows, everywhere = NamedSharding(mesh, P("i")), NamedSharding(mesh, P())

    def activation(x):
      return lax.platform_dependent(
          x, cpu=jnp.sin, cuda=jnp.cos, tpu=jnp.tanh)

    def loss(w, x):
      return (activation(x @ w) ** 2).mean()

    def train(w, x):
      step = lambda w, _: (w - .1 * jax.grad(loss)(w, x), None)
      return lax.scan(step, w, None, length=3)[0]

    x = np.linspace(0, 1, 8, dtype=np.float32).reshape(4, 2)
    w = np.ones(2, np.float32)
    step = jax.jit(train, in_shardings=(everywhere, rows),
                   out_shardings=everywhere)
    global_x = jax.make_array_from_callback(x.shape, rows, x.__getitem__)
    global_w = jax.make_array_from_callback(w.shape, everywhere, w.__getitem__)
    text = step.lower(global_w, global_x).as_text()
    digest = hashlib.sha256(text.encode()).digest()
    multihost_utils.assert_equal(
        np.frombuffer(digest, np.uint8), "the processes made different modules")
    out = np.asarray(step(global_w, global_x).addressable_data(0))
    expected = w.copy()
    for _ in range(3):
      z = x @ expected
      expected -= .1 * (2 * np.sin(z) * np.cos(z)) @ x / 4
    np.testing.assert_allclose(out, expected, rtol=1e-4)
    print("module", digest.hex())
    """

CACHE = """
    import sys
    import jax, jax_cond_patch
    import jax.numpy as jnp
    import numpy as np
    from jax import lax
    from jax._src import monitoring

    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    if hasattr(jax.config, "jax_persistent_cache_min_entry_size_bytes"):
      jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    events = []
    monitoring.register_event_listener(lambda event, **_: events.append(event))

    def count(name):
      return sum(e == f"/jax/compilation_cache/cache_{name}" for e in events)

    def host(x):
      # It has no derivative, and its branch is not reached.
      return jax.pure_callback(
          lambda x: x, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    f = lambda x: lax.platform_dependent(
        x, cpu=lambda x: jnp.sin(x) * 1.25, cuda=lambda x: jnp.sin(x) * 2.25)
    g = lambda x: lax.platform_dependent(x, cpu=jnp.sin, cuda=host)
    x = np.linspace(0, 1, 4, dtype=np.float32)
    programs = [
        (f, np.sin(x) * 1.25),
        (lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0],
         np.sin(np.sin(x) * 1.25) * 1.25),
        (jax.vmap(lambda x: f(x[None])[0]), np.sin(x) * 1.25),
    ]
    if jax_cond_patch.is_active():
      programs.append((jax.grad(lambda x: g(x).sum()), np.cos(x)))
    for program, expected in programs:
      np.testing.assert_allclose(jax.jit(program)(x), expected, rtol=1e-5)
    print("programs", len(programs), "hits", count("hits"),
          "misses", count("misses"))
    """


class ProcessesTest(tu.JcpTestCase):

  def start(self, code, *args, **env):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *args], text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": tu.python_path(),
             "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", **env})

  def finish(self, process):
    out, err = process.communicate(timeout=300)
    self.assertEqual(process.returncode, 0, err)
    return out.split()

  def start_training(self, *environments):
    with socket.socket() as s:
      s.bind(("localhost", 0))
      address = f"localhost:{s.getsockname()[1]}"
    return [self.start(TRAINING, address, str(i), **env)
            for i, env in enumerate(environments)]

  @tu.requires("cpu_collectives")
  def test_two_processes_train(self):
    """They make the same module, whatever order their hashes have."""
    modules = {self.finish(process)[-1] for seeds in (("0", "1"), ("2", "3"))
               for process in self.start_training(
                   *(dict(PYTHONHASHSEED=s) for s in seeds))}
    self.assertLen(modules, 1)

  @tu.requires("cpu_collectives")
  def test_one_process_without_the_package(self):
    """It is noticed as docs/pages/limits.md says."""
    processes = self.start_training({}, dict(JAX_COND_PATCH="0"))
    # At its end a process waits for the other one, which waits for it.
    timer = threading.Timer(120, lambda: [p.kill() for p in processes])
    timer.start()
    try:
      self.assertIn("the processes made different modules", next(
          (line for line in processes[1].stderr if "Error: " in line), ""))
    finally:
      timer.cancel()
      for process in processes:
        process.kill()
        process.communicate()

  @tu.requires("persistent_cache_on_cpu")
  def test_persistent_cache(self):
    """A second process finds what the first one has compiled."""
    def run(folder, **env):
      words = self.finish(self.start(CACHE, folder, **env))
      return dict(zip(words[::2], map(int, words[1::2])))
    with tempfile.TemporaryDirectory() as folder:
      # What it has of JAX without the package is right too, and shared with
      # none but those programs that are the same.
      run(folder, JAX_COND_PATCH="0")
      first = run(folder, PYTHONHASHSEED="1")
      self.assertGreater(first["misses"], 0)
      second = run(folder, PYTHONHASHSEED="2")
      self.assertEqual(second["misses"], 0, second)
      self.assertGreaterEqual(second["hits"], second["programs"])
      run(folder, JAX_COND_PATCH="0")


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
