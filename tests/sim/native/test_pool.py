"""The second thread by itself: every task of every list is done once, whoever is late."""

import subprocess
from pathlib import Path

import pytest
from makalu.sim import native, toolchain

SOURCE = """
#include "runtime.h"
#include <stdatomic.h>
#include <stdio.h>
#include <time.h>

/* A thread that has to wait here and there, as if another program ran instead. */
static _Thread_local u32 dice = 12345;
static int pauses(void) {
    dice = dice * 1664525 + 1013904223;
    struct timespec some = {0, 30000};
    if (dice >> 16 & 1) nanosleep(&some, 0);
    return 1;
}
#undef atomic_fetch_add
#define atomic_fetch_add(p, n) (pauses() ? __atomic_fetch_add(p, n, __ATOMIC_SEQ_CST) : 0)

#define WORTH 0
enum { MOST = 40 };
struct state { struct pool *pool; u16 tasks[MOST]; u32 done[2][MOST]; };
#include "pool.h"

static void run_task(struct state *restrict s, int task, int thread) { s->done[thread][task]++; }

int main(void) {
    struct state s = {0};
    u32 shares[2] = {0}, wrong = 0;
    if (threads(&s, 2) != 2) return 1;
    for (int list = 0; list < 300; ++list) {
        int n = 2 + list * 7 % (MOST - 2);
        memset(s.done, 0, sizeof s.done);
        for (int i = 0; i < n; ++i) s.tasks[i] = n - 1 - i;
        begin(&s, n, 1);
        finish(&s);
        for (int i = 0; i < MOST; ++i) {
            wrong += s.done[0][i] + s.done[1][i] != (i < n);
            for (int thread = 0; thread < 2; ++thread) shares[thread] += s.done[thread][i];
        }
    }
    threads(&s, 1);
    printf("%u %u %u", wrong, shares[0], shares[1]);
    return 0;
}
"""


@pytest.mark.parametrize("spins", [1, 20000])
def test_a_helper_that_is_late_for_a_list_begins_the_next_at_its_end(tmp_path, spins):
    (tmp_path / "test.c").write_text(SOURCE)
    cc, program = toolchain.find_cc(), tmp_path / "test"
    toolchain.run_all(
        [[*cc, "-O1", "-std=gnu11", "-pthread", f"-DSPINS={spins}",
          f"-I{Path(native.__file__).parent}", "-o", str(program), str(tmp_path / "test.c")]]
    )  # fmt: skip
    done = subprocess.run([program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"the program ended with {done.returncode}"
    wrong, *shares = map(int, done.stdout.split())
    assert not wrong, f"{wrong} tasks were not done exactly once"
    assert min(shares) > 0, "one thread did everything"
