/* A FAKE libnvidia-ml.so.1, for machines without a GPU: the real pynvml talks to it over the real C interface.
 *
 * Each call reads the file named by FAKE_NVML afresh, so that a test can change a reading under a running process.
 * One line a GPU:   <gpu %> <memory %> <power mW> <limit mW> <error code of every reading, 0 for none>
 * Built by the tests: gcc -shared -fPIC -o libnvidia-ml.so.1 fake_nvml.c
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define DONE 0
#define BAD_ARGUMENT 2

struct card { unsigned gpu, memory, power, limit; int error; };
struct rates { unsigned gpu, memory; };
struct client { unsigned pid; unsigned long long memory; unsigned instance, compute; };

static int cards(struct card *out, int most)
{
    const char *name = getenv("FAKE_NVML");
    FILE *file = name ? fopen(name, "r") : NULL;
    int count = 0;
    if (!file)
        return 0;
    while (count < most &&
           fscanf(file, "%u %u %u %u %d", &out->gpu, &out->memory, &out->power, &out->limit, &out->error) == 5) {
        out++;
        count++;
    }
    fclose(file);
    return count;
}

/* A handle is the card's number plus one. */
static int card_of(void *handle, struct card *out)
{
    struct card all[16];
    intptr_t number = (intptr_t)handle - 1;
    if (number < 0 || number >= cards(all, 16))
        return BAD_ARGUMENT;
    *out = all[number];
    return out->error;
}

int nvmlInitWithFlags(unsigned flags) { (void)flags; return DONE; }
int nvmlInit_v2(void) { return DONE; }
int nvmlShutdown(void) { return DONE; }
const char *nvmlErrorString(int code) { static char text[40]; snprintf(text, sizeof text, "error %d of the fake", code); return text; }

int nvmlDeviceGetCount_v2(unsigned *count)
{
    struct card all[16];
    *count = (unsigned)cards(all, 16);
    return DONE;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle)
{
    *handle = (void *)((intptr_t)index + 1);
    return DONE;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size)
{
    snprintf(text, size, "Fake card %d", (int)(intptr_t)handle - 1);
    return DONE;
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size)
{
    snprintf(text, size, "GPU-fake-%d", (int)(intptr_t)handle - 1);
    return DONE;
}

int nvmlDeviceGetUtilizationRates(void *handle, struct rates *out)
{
    struct card card;
    int error = card_of(handle, &card);
    if (!error)
        *out = (struct rates){card.gpu, card.memory};
    return error;
}

int nvmlDeviceGetPowerUsage(void *handle, unsigned *out)
{
    struct card card;
    int error = card_of(handle, &card);
    if (!error)
        *out = card.power;
    return error;
}

int nvmlDeviceGetEnforcedPowerLimit(void *handle, unsigned *out)
{
    struct card card;
    int error = card_of(handle, &card);
    if (!error)
        *out = card.limit;
    return error;
}

int nvmlDeviceGetClockInfo(void *handle, int which, unsigned *out)
{
    struct card card;
    int error = card_of(handle, &card);
    *out = which == 1 ? 1980 : 2619;
    return error;
}

int nvmlDeviceGetPcieThroughput(void *handle, int which, unsigned *out)
{
    struct card card;
    int error = card_of(handle, &card);
    *out = which == 0 ? 2048 : 4096;
    return error;
}

/* A card hotter than its limit says so: software thermal slowdown where its power is at the limit. */
int nvmlDeviceGetCurrentClocksThrottleReasons(void *handle, unsigned long long *out)
{
    struct card card;
    int error = card_of(handle, &card);
    if (!error)
        *out = card.power >= card.limit ? 0x20 : card.gpu == 0 ? 0x1 : 0;
    return error;
}

/* Not there on this card, whatever else is: NVML_ERROR_NOT_SUPPORTED. */
int nvmlDeviceGetTemperature(void *handle, int which, unsigned *out)
{
    (void)handle; (void)which; (void)out;
    return 3;
}

/* One event of the driver for each number in the file FAKE_XID, on card 0; the file is taken away. */
struct event { void *device; unsigned long long type, data; unsigned instance, compute; };

int nvmlEventSetCreate(void **set) { *set = (void *)1; return DONE; }
int nvmlDeviceRegisterEvents(void *handle, unsigned long long types, void *set) { (void)handle; (void)types; (void)set; return DONE; }
int nvmlDeviceGetIndex(void *handle, unsigned *index) { *index = (unsigned)(intptr_t)handle - 1; return DONE; }

int nvmlEventSetWait_v2(void *set, struct event *out, unsigned timeout)
{
    static unsigned waiting[8];
    static int count;
    const char *name = getenv("FAKE_XID");
    FILE *file = name && !count ? fopen(name, "r") : NULL;
    (void)set; (void)timeout;
    if (file) {
        while (count < 8 && fscanf(file, "%u", &waiting[count]) == 1)
            count++;
        fclose(file);
        remove(name);
    }
    if (!count)
        return 10; /* NVML_ERROR_TIMEOUT */
    *out = (struct event){(void *)1, 8, waiting[--count], 0, 0};
    return DONE;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, struct client *out)
{
    (void)handle;
    (void)out;
    *count = 0;
    return DONE;
}
