"""Tests of threads and processes while the package is switched on and off."""
import itertools
import random
import threading

from absl.testing import absltest
import jax
from jax import lax
from jax._src import config
from jax._src import test_util as jtu
import jax.numpy as jnp
import numpy as np

import jax_cond_patch
import jcp_test_util as tu

config.parse_flags_with_absl()

X = np.float32(.5)
PLATFORMS = ("cpu", "cuda", "tpu")
THREADS = 16


def program(kind: str, number: int):
  """Makes a function, and what it computes on each platform."""
  factors = {p: np.float32(number + i + .25) for i, p in enumerate(PLATFORMS)}
  def choose(x):
    return lax.platform_dependent(
        x, **{p: lambda x, a=a: jnp.sin(x) * a for p, a in factors.items()})
  def chosen(platform, x):
    return np.sin(x) * factors[platform]
  def twice(platform, x):
    return chosen(platform, chosen(platform, x))
  helper = jax.jit(choose)
  return {
      "plain": (choose, chosen),
      "jit": (lambda x: helper(helper(x)), twice),
      "scan": (lambda x: lax.scan(
          lambda c, _: (choose(c), None), x, None, length=2)[0], twice),
      "grad": (jax.grad(choose),
               lambda platform, x: np.cos(x) * factors[platform]),
      "vmap": (lambda x: jax.vmap(choose)(jnp.stack([x, x]))[1], chosen),
  }[kind]


KINDS = ("plain", "jit", "scan", "grad", "vmap")


class ThreadsTest(tu.JcpTestCase):

  def work_in_threads(self, meanwhile):
    """Runs programs in threads, checks them, and switches as it is told."""
    # Some functions are of all threads, so that they share what is traced.
    shared = [(jax.jit(f), expected) for f, expected in (
        program(kind, 0) for kind in KINDS)]
    numbers = itertools.count(1)
    done = threading.Event()
    errors = []
    counts = [0] * THREADS

    def work(thread):
      draw = random.Random(thread)
      while not done.is_set():
        if draw.random() < .5:
          f, expected = draw.choice(shared)
        else:
          f, expected = program(draw.choice(KINDS), next(numbers))
          f = jax.jit(f)
        if draw.random() < .5:
          platform, y = "cpu", f(X)
        else:
          platforms = draw.sample(PLATFORMS, draw.randint(1, 3))
          platform = draw.choice(platforms)
          exported = tu.export(f, platforms=platforms)(X)
          y = tu.run_as(exported, platform, X)
        np.testing.assert_allclose(y, expected(platform, X), rtol=1e-4)
        counts[thread] += 1

    def work_or_tell(thread):
      try:
        work(thread)
      except BaseException as error:
        errors.append(error)

    threads = [threading.Thread(target=work_or_tell, args=(i,))
               for i in range(THREADS)]
    for thread in threads:
      thread.start()
    try:
      for then in meanwhile:
        before = sum(counts)
        while sum(counts) < before + THREADS and not errors:
          done.wait(.01)
        then()
    finally:
      done.set()
      for thread in threads:
        thread.join()
      jax_cond_patch.activate()
    if errors:
      raise errors[0]
    for f, _ in shared:
      text = f.lower(X).as_text()
      self.assertNotIn("case", text)

  @jtu.run_on_devices("cpu")
  def test_work_of_threads(self):
    self.work_in_threads([lambda: None])

  @tu.requires("switch_that_waits")
  @jtu.run_on_devices("cpu")
  def test_switching_while_others_work(self):
    self.work_in_threads(
        2 * [jax_cond_patch.deactivate, jax_cond_patch.activate])

  @tu.requires("switch_that_waits")
  def test_trace_that_a_switch_overtakes(self):
    """It goes on as it began, and is not used after the switch."""
    in_trace, switched = threading.Event(), threading.Event()
    traced_in = []

    @jax.jit
    def f(x):
      y = lax.platform_dependent(x, cpu=jnp.sin, default=jnp.cos)
      traced_in.append(threading.current_thread())
      if threading.current_thread() is thread:
        in_trace.set()
        # The switch waits for this thread, once it has begun.
        switched.wait(1)
      return y

    def export():
      exported.append(tu.export(jax.jit(jax.grad(f)), platforms=PLATFORMS)(X))

    for before, switch in (
        (jax_cond_patch.activate, jax_cond_patch.deactivate),
        (jax_cond_patch.deactivate, jax_cond_patch.activate)):
      before()
      in_trace.clear()
      switched.clear()
      traced_in.clear()
      exported: list = []
      thread = threading.Thread(target=export)
      thread.start()
      in_trace.wait(60)
      try:
        switch()
        switched.set()
        thread.join()
        export()
      finally:
        jax_cond_patch.activate()
      self.assertEqual(traced_in, [thread, threading.current_thread()])
      self.assertLen(exported, 2)
      for each in exported:
        np.testing.assert_allclose(
            tu.run_as(each, "cpu", X), np.cos(X), rtol=1e-5)
        np.testing.assert_allclose(
            tu.run_as(each, "tpu", X), -np.sin(X), rtol=1e-5)

  def test_switching_while_others_make_jitted_functions(self):
    """In a process of its own, which JAX 0.4.34 to 0.4.38 could crash."""
    result = tu.run_python("""
        import threading
        import time
        import jax
        import jax_cond_patch

        def make():
          return [jax.jit(lambda x, i=i: x + i) for i in range(20)]

        def work():
          while not done.is_set():
            make()
            time.sleep(.01)

        done = threading.Event()
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
          thread.start()
        try:
          for _ in range(3):
            for switch in jax_cond_patch.deactivate, jax_cond_patch.activate:
              assert [f(1.) for f in make()] == list(range(1, 21))
              switch()
        finally:
          done.set()
        """, PYTHONPATH=tu.python_path(), JAX_PLATFORMS="cpu")
    self.assertEqual(result.returncode, 0, result.stderr)

  def test_fork_and_spawn(self):
    """Neither is half patched, also if the package is switched meanwhile."""
    result = tu.run_python("""
        import multiprocessing
        import os
        import threading
        import time
        import jax, jax_cond_patch
        from jax_cond_patch import activation

        def check():
          status = jax_cond_patch.status()
          places = [r.place.get() for r in activation.table()]
          assert status.active == (places != original), status
          assert len(status.replaced) == status.active * len(places), status
          f = lambda x: jax.lax.platform_dependent(
              x, cpu=lambda x: x + 1.5, default=lambda x: x + 2.5)
          text = jax.jit(f).lower(1.).as_text()
          assert ("case" in text) == (not status.active)

        if __name__ == "__main__":
          with jax_cond_patch.deactivated():
            original = [r.place.get() for r in activation.table()]
          done = False
          def switch():
            while not done:
              jax_cond_patch.deactivate()
              jax_cond_patch.activate()
              time.sleep(.01)  # else the lock is hardly ever free
          thread = threading.Thread(target=switch)
          thread.start()
          try:
            for _ in range(8):
              pid = os.fork()
              if not pid:
                code = 1
                try:
                  check()
                  code = 0
                finally:
                  os._exit(code)
              assert os.waitpid(pid, 0)[1] == 0
          finally:
            done = True
            thread.join()
          check()
          # The code of `-c` is not there to be imported.
          process = multiprocessing.get_context("spawn").Process(
              target=exec, args=("import jax, jax_cond_patch; "
                                 "assert jax_cond_patch.is_active()",))
          process.start()
          process.join()
          assert process.exitcode == 0
        """, PYTHONPATH=tu.python_path(), JAX_PLATFORMS="cpu")
    self.assertEqual(result.returncode, 0, result.stderr)


if __name__ == "__main__":
  absltest.main(testLoader=jtu.JaxTestLoader())
