/* Glue between a core with its HBM as C and Python: register bus, runs, HBM.
 *
 * `user` of the state is the HBM: its first word tells how many words follow. The inputs and outputs
 * of the top are `in_NAME` and `out_NAME`. */

enum { PATIENCE = 10000 }; /* cycles that the register bus may take to answer */

int machine_reg_write(struct state *s, u32 address, u32 value) {
    s->in_host__awaddr = address;
    s->in_host__wdata = value;
    s->in_host__wstrb = 15;
    s->in_host__awvalid = s->in_host__wvalid = s->in_host__bready = 1;
    int response = -1;
    for (int i = 0; i < PATIENCE && response < 0; ++i) {
        early(s);
        int aw = s->in_host__awvalid && out_host__awready_0(s);
        int w = s->in_host__wvalid && out_host__wready_0(s);
        if (out_host__bvalid_0(s)) response = out_host__bresp_0(s);
        late(s);
        if (aw) s->in_host__awvalid = 0;
        if (w) s->in_host__wvalid = 0;
    }
    s->in_host__awvalid = s->in_host__wvalid = s->in_host__bready = 0;
    return response;
}

int machine_reg_read(struct state *s, u32 address, u32 *value) {
    s->in_host__araddr = address;
    s->in_host__arvalid = s->in_host__rready = 1;
    int response = -1;
    for (int i = 0; i < PATIENCE && response < 0; ++i) {
        early(s);
        int ar = s->in_host__arvalid && out_host__arready_0(s);
        if (out_host__rvalid_0(s)) {
            response = out_host__rresp_0(s);
            *value = out_host__rdata_0(s);
        }
        late(s);
        if (ar) s->in_host__arvalid = 0;
    }
    s->in_host__arvalid = s->in_host__rready = 0;
    return response;
}

/* Reads register `address` until none of the bits in `mask` is set: 0, or until `cycles` have
 * passed: 1, or until the bus fails: -1. */
int machine_run(struct state *s, u32 address, u32 mask, u64 cycles) {
    u64 end = s->cycles + cycles;
    do {
        u32 value = 0;
        if (machine_reg_read(s, address, &value)) return -1;
        if (!(value & mask)) return 0;
    } while (s->cycles < end);
    return 1;
}

void machine_attach(struct state *s, void *hbm) { s->user = hbm; }

void machine_step(struct state *s, u64 cycles) { step(s, cycles); }

u64 machine_cycles(struct state *s) { return s->cycles; }
