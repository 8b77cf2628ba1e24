/* A second thread that helps with the tasks of a cycle.
 *
 * The results do not depend on who does a task. Tasks are handed out by tickets: the number of the
 * list they are of, and which of them. A helper that is late finds no tickets, and nobody waits for
 * it. */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>

#ifndef WORTH
#define WORTH 30000 /* cells in a cycle from which on help pays */
#endif
#ifndef SPINS
#define SPINS 20000 /* looks for work before sleeping */
#endif

struct pool {
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
    _Atomic u64 ticket; /* number of the list << 32 | its length << 16 | tasks taken */
    atomic_uint done, quit, asleep;
    u64 list;
    unsigned count;
    struct state *state;
};

struct share { /* how many tasks of a list a thread has taken */
    u64 list;
    unsigned taken;
};

static void run_task(struct state *restrict s, int task, int thread);

/* Do one more task of the list, the first thread from its beginning, the second from its end: so
 * each does mostly the same ones in every cycle, and finds their lanes in its own cache. The ticket
 * may be of another list than the one before: then the thread has taken nothing of it yet. */
static int help(struct pool *p, int thread, struct share *mine) {
    u64 ticket = atomic_fetch_add(&p->ticket, 1);
    unsigned count = ticket >> 16 & 0xffff;
    if ((ticket & 0xffff) >= count) return 0;
    if (mine->list != ticket >> 32) *mine = (struct share){ticket >> 32, 0};
    unsigned at = mine->taken++;
    run_task(p->state, p->state->tasks[thread ? count - 1 - at : at], thread);
    atomic_fetch_add(&p->done, 1);
    return 1;
}

static void *helper(void *argument) {
    struct pool *p = argument;
    struct share mine = {0, 0};
    u64 seen = 0;
    while (!atomic_load(&p->quit)) {
        int spins = 0;
        while (atomic_load(&p->ticket) >> 32 == seen && !atomic_load(&p->quit)) {
            if (++spins < SPINS) {
                RELAX;
                continue;
            }
            pthread_mutex_lock(&p->mutex);
            atomic_store(&p->asleep, 1);
            while (atomic_load(&p->ticket) >> 32 == seen && !atomic_load(&p->quit))
                pthread_cond_wait(&p->wake, &p->mutex);
            atomic_store(&p->asleep, 0);
            pthread_mutex_unlock(&p->mutex);
        }
        seen = atomic_load(&p->ticket) >> 32;
        while (help(p, 1, &mine)) {}
    }
    return 0;
}

/* Offer the first `n` of the tasks, `work` cells in all, and what follows meanwhile. */
static void begin(struct state *s, int n, u64 work) {
    struct pool *p = s->pool;
    if (!p || work < WORTH || n < 2) {
        for (int i = 0; i < n; ++i) run_task(s, s->tasks[i], 0);
        return;
    }
    atomic_store(&p->done, 0);
    p->count = n;
    atomic_store(&p->ticket, ++p->list << 32 | (u64)n << 16);
    if (atomic_load(&p->asleep)) {
        pthread_mutex_lock(&p->mutex);
        pthread_cond_signal(&p->wake);
        pthread_mutex_unlock(&p->mutex);
    }
}

/* Help, and wait until all of them are done. */
static void finish(struct state *s) {
    struct pool *p = s->pool;
    if (!p || !p->count) return;
    struct share mine = {0, 0};
    while (help(p, 0, &mine)) {}
    for (int spins = 0; atomic_load(&p->done) < p->count; ++spins)
        if (spins < SPINS) RELAX;
        else sched_yield();
    p->count = 0;
}

/* How many threads work from now on: 1 or 2. Returns how many do. */
int threads(struct state *s, int number) {
    struct pool *p = s->pool;
    if (p && number < 2) {
        pthread_mutex_lock(&p->mutex);
        atomic_store(&p->quit, 1);
        pthread_cond_signal(&p->wake);
        pthread_mutex_unlock(&p->mutex);
        pthread_join(p->thread, 0);
        pthread_cond_destroy(&p->wake);
        pthread_mutex_destroy(&p->mutex);
        free(p);
        s->pool = 0;
    }
    if (!p && number > 1 && (p = calloc(1, sizeof *p))) {
        p->state = s;
        pthread_mutex_init(&p->mutex, 0);
        pthread_cond_init(&p->wake, 0);
        if (pthread_create(&p->thread, 0, helper, p)) free(p);
        else s->pool = p;
    }
    return s->pool ? 2 : 1;
}
