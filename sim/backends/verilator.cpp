// Glue between a verilated core with its HBM and Python: clock, register bus, back doors.
//
// MAKALU_SETTINGS is defined as the statements that drive the settings of the HBM.

#include "Vtop.h"
#include "Vtop__Dpi.h"
#include "verilated.h"
#include "verilated_syms.h"

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

struct Context : VerilatedContext {
    Context() { Verilated::threadContextp(this); }  // blocks are made in the thread's context
};

struct Machine {
    Context context;
    Vtop model{&context};
    uint64_t* hbm = nullptr;
    uint64_t words = 0;
    uint64_t cycles = 0;

    // One clock cycle; whatever was set before takes effect, and outputs are looked at by `before`
    // just ahead of the edge.
    template <typename Before> void cycle(Before before) {
        model.clk = 0;
        model.eval();
        before();
        model.clk = 1;
        model.eval();
        ++cycles;
    }
    void cycle() {
        cycle([] {});
    }
};

constexpr int patience = 10000;  // cycles that the register bus may take to answer
thread_local Machine* current;   // whose HBM the model being evaluated reads

void enter(Machine* m) {
    current = m;
    ++blocks_epoch;  // Python may have written into memories
    Verilated::threadContextp(&m->context);
}

int reg_write(Machine* m, uint32_t address, uint32_t value) {
    Vtop& t = m->model;
    t.host___05Fawaddr = address;
    t.host___05Fwdata = value;
    t.host___05Fwstrb = 15;
    t.host___05Fawvalid = t.host___05Fwvalid = t.host___05Fbready = 1;
    int response = -1;
    for (int i = 0; i < patience && response < 0; ++i) {
        bool aw, w;
        m->cycle([&] {
            aw = t.host___05Fawvalid && t.host___05Fawready;
            w = t.host___05Fwvalid && t.host___05Fwready;
            if (t.host___05Fbvalid) response = t.host___05Fbresp;
        });
        if (aw) t.host___05Fawvalid = 0;
        if (w) t.host___05Fwvalid = 0;
    }
    t.host___05Fawvalid = t.host___05Fwvalid = t.host___05Fbready = 0;
    return response;
}

int reg_read(Machine* m, uint32_t address, uint32_t* value) {
    Vtop& t = m->model;
    t.host___05Faraddr = address;
    t.host___05Farvalid = t.host___05Frready = 1;
    int response = -1;
    for (int i = 0; i < patience && response < 0; ++i) {
        bool ar;
        m->cycle([&] {
            ar = t.host___05Farvalid && t.host___05Farready;
            if (t.host___05Frvalid) {
                response = t.host___05Frresp;
                *value = t.host___05Frdata;
            }
        });
        if (ar) t.host___05Farvalid = 0;
    }
    t.host___05Farvalid = t.host___05Frready = 0;
    return response;
}

}  // namespace

// The array of the HBM, as the model sees it. A port reads its array before it knows whether the
// burst is refused; what it gets then goes nowhere.

unsigned long long makalu_hbm_read(unsigned int address) {
    return address < current->words ? current->hbm[address] : 0;
}

void makalu_hbm_write(unsigned int address, unsigned long long data, unsigned char strobe) {
    if (address >= current->words) return;
    uint64_t mask = strobe * UINT64_C(0x0101010101010101) & UINT64_C(0x8040201008040201);
    mask = ((mask + UINT64_C(0x7F7F7F7F7F7F7F7F)) | mask) & UINT64_C(0x8080808080808080);
    mask = (mask >> 7) * 255;
    uint64_t& word = current->hbm[address];
    word = (word & ~mask) | (data & mask);
}

extern "C" {

void* machine_open(uint64_t words, uint64_t bytes_per_cycle, uint64_t latency, uint64_t min_beats) {
    auto m = new Machine;
    m->hbm = static_cast<uint64_t*>(calloc(words, sizeof(uint64_t)));
    m->words = words;
    if (!m->hbm) {
        delete m;
        return nullptr;
    }
    enter(m);
    MAKALU_SETTINGS
    m->model.rst = 0;
    m->cycle();
    return m;
}

void machine_close(void* p) {
    auto m = static_cast<Machine*>(p);
    enter(m);
    m->model.final();
    free(m->hbm);
    delete m;
    current = nullptr;
    Verilated::threadContextp(Verilated::defaultContextp());
}

void* machine_hbm(void* p) { return static_cast<Machine*>(p)->hbm; }

uint64_t machine_cycles(void* p) { return static_cast<Machine*>(p)->cycles; }

// Lines "scope bytes address" of every public memory; returns the length wanted.
uint64_t machine_memories(void* p, char* text, uint64_t size) {
    auto m = static_cast<Machine*>(p);
    std::string lines;
    for (auto& [name, scope] : *m->context.scopeNameMap()) {
        if (!scope->varsp()) continue;
        for (auto& [variable, info] : *scope->varsp()) {
            if (strcmp(variable, "mem")) continue;
            lines += std::string(name) + " " + std::to_string(info.totalSize()) + " "
                     + std::to_string(reinterpret_cast<uintptr_t>(info.datap())) + "\n";
        }
    }
    if (lines.size() < size) memcpy(text, lines.c_str(), lines.size() + 1);
    return lines.size() + 1;
}

// Both return the response code, or -1 if there was none.
int machine_reg_write(void* p, uint32_t address, uint32_t value) {
    enter(static_cast<Machine*>(p));
    return reg_write(current, address, value);
}

int machine_reg_read(void* p, uint32_t address, uint32_t* value) {
    enter(static_cast<Machine*>(p));
    return reg_read(current, address, value);
}

void machine_step(void* p, uint64_t cycles) {
    enter(static_cast<Machine*>(p));
    while (cycles--) current->cycle();
}

// Reads register `address` until none of the bits in `mask` is set: 0, or until `cycles` have
// passed: 1, or until the bus fails: -1.
int machine_run(void* p, uint32_t address, uint32_t mask, uint64_t cycles) {
    enter(static_cast<Machine*>(p));
    uint64_t end = current->cycles + cycles;
    do {
        uint32_t value = 0;
        if (reg_read(current, address, &value)) return -1;
        if (!(value & mask)) return 0;
    } while (current->cycles < end);
    return 1;
}
}
