/* What the functions of a design are called by: until something happens, and with notes taken. */

/* Runs until the words of an output have these values, or for so many cycles: whether they have. */
int run_until(struct state *s, int number, int count, const u64 *value, u64 cycles) {
    for (;; --cycles) {
        early(s);
        int same = 1;
        for (int i = 0; i < count; ++i) same &= output(s, number + i) == value[i];
        if (same || !cycles) return same;
        late(s);
    }
}

/* Words of the state, of which notes are taken in every cycle of a window: those that are there
 * before the clock edge, then those that are computed on the way to it. */
struct word {
    u64 offset, size;
    u64 other; /* distance of the second copy, of a register that has two */
};

struct notes {
    u64 from, until; /* cycles */
    u64 count, early; /* words */
    const struct word *words;
    u64 rows, room;
    u64 *data; /* rows of words */
    u64 lost;  /* cycle for which there was no memory, after which nothing is noted */
};

static void notes_some(struct state *s, struct notes *n, u64 first, u64 last) {
    u64 *row = n->data + n->rows * n->count;
    for (u64 i = first; i < last; ++i) {
        const struct word *w = n->words + i;
        const u8 *at = (const u8 *)s + w->offset + s->flip * w->other;
        switch (w->size) {
        case 1: row[i] = *at; break;
        case 2: row[i] = *(const u16 *)at; break;
        case 4: row[i] = *(const u32 *)at; break;
        default: row[i] = *(const u64 *)at;
        }
    }
}

/* Called before and after the clock edge. */
NOINLINE static void take_notes(struct state *s, int after) {
    struct notes *n = s->notes;
    if (s->cycles < n->from || s->cycles >= n->until) return;
    if (n->rows == n->room) {
        u64 room = n->room ? 2 * n->room : 64;
        u64 *data = realloc(n->data, room * n->count * sizeof(u64));
        if (!data) {
            n->until = n->lost = s->cycles;
            return;
        }
        n->data = data;
        n->room = room;
    }
    if (!after) {
        notes_some(s, n, 0, n->early);
    } else {
        notes_some(s, n, n->early, n->count);
        n->rows++;
    }
}

void notes_begin(struct state *s, struct notes *n) { s->notes = n; }

void notes_end(struct state *s) {
    free(s->notes->data);
    s->notes->data = 0;
    s->notes = 0;
}
