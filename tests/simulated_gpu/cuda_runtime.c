/* A CUDA runtime (13) that reports SIMULATED_GPUS GPUs and runs nothing.

   torch asks it how many GPUs there are, which one is current in a thread, for streams, events and pinned memory. All
   work is over at once. No tensor of the simulation has memory of a GPU, so a kernel or a copy that reaches this file
   went around the simulation, and ends the process with its name. */

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, CUDA_VERSION = 13020, NAME_BYTES = 256, PROPERTIES_BYTES = 1008, POINTER_BYTES = 88, IS_HOST = 1 };
/* Offsets in cudaDeviceProp of CUDA 13 */
enum { TOTAL_MEMORY = 288, WARP_SIZE = 308, CAPABILITY = 360, PROCESSORS = 384, THREADS = 604, SHARED_MEMORY = 672 };

static const size_t MEMORY_BYTES = (size_t)139 << 30;

static __thread int current_device = 0;
static unsigned long num_handles = 0;

static int num_gpus(void) {
    const char *given = getenv("SIMULATED_GPUS");
    return given ? atoi(given) : 1;
}

/* Streams and events are numbers. */
static int make_handle(void **handle) {
    *handle = (void *)(++num_handles * 16);
    return SUCCESS;
}

static int refuse(const char *name) {
    fprintf(stderr, "the simulation was asked for %s: a tensor of the GPU went around it\n", name);
    abort();
}

/* Devices */
int cudaGetDeviceCount(int *count) { *count = num_gpus(); return SUCCESS; }
int cudaGetDevice(int *device) { *device = current_device; return SUCCESS; }
int cudaSetDevice(int device) { current_device = device; return SUCCESS; }
int cudaInitDevice(int device, unsigned a, unsigned b) { return SUCCESS; }
int cudaDeviceGetAttribute(int *value, int attribute, int device) { *value = 1; return SUCCESS; }
int cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = 1; return SUCCESS; }
int cudaDeviceSynchronize(void) { return SUCCESS; }
int cudaGetDeviceProperties(void *properties, int device) {
    char *fields = properties;
    const char *capability = getenv("SIMULATED_CAPABILITY");
    memset(fields, 0, PROPERTIES_BYTES);
    snprintf(fields, NAME_BYTES, "NVIDIA H200");
    *(size_t *)(fields + TOTAL_MEMORY) = MEMORY_BYTES;
    *(int *)(fields + WARP_SIZE) = 32;
    sscanf(capability ? capability : "9.0", "%d.%d", (int *)(fields + CAPABILITY), (int *)(fields + CAPABILITY) + 1);
    *(int *)(fields + PROCESSORS) = 132;
    *(int *)(fields + THREADS) = 2048;
    *(size_t *)(fields + SHARED_MEMORY) = 227 << 10;
    return SUCCESS;
}
int cudaGetDeviceProperties_v2(void *properties, int device) { return cudaGetDeviceProperties(properties, device); }
int cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) { *free_bytes = *total_bytes = MEMORY_BYTES; return SUCCESS; }

/* Versions and errors */
int cudaDriverGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
int cudaRuntimeGetVersion(int *version) { *version = CUDA_VERSION; return SUCCESS; }
int cudaGetLastError(void) { return SUCCESS; }
int cudaPeekAtLastError(void) { return SUCCESS; }
const char *cudaGetErrorString(int error) { return "no error"; }
const char *cudaGetErrorName(int error) { return "cudaSuccess"; }

/* Streams and events */
int cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return SUCCESS; }
int cudaStreamCreateWithPriority(void **stream, unsigned flags, int priority) { return make_handle(stream); }
int cudaStreamDestroy(void *stream) { return SUCCESS; }
int cudaStreamQuery(void *stream) { return SUCCESS; }
int cudaStreamSynchronize(void *stream) { return SUCCESS; }
int cudaStreamWaitEvent(void *stream, void *event, unsigned flags) { return SUCCESS; }
int cudaStreamIsCapturing(void *stream, int *status) { *status = 0; return SUCCESS; }
int cudaThreadExchangeStreamCaptureMode(int *mode) { return SUCCESS; }
int cudaEventCreateWithFlags(void **event, unsigned flags) { return make_handle(event); }
int cudaEventRecord(void *event, void *stream) { return SUCCESS; }
int cudaEventRecordWithFlags(void *event, void *stream, unsigned flags) { return SUCCESS; }
int cudaEventQuery(void *event) { return SUCCESS; }
int cudaEventSynchronize(void *event) { return SUCCESS; }
int cudaEventDestroy(void *event) { return SUCCESS; }

/* Memory of the host: pinned as long as it is allocated. */
enum { MOST_BLOCKS = 1 << 12 };
static struct { char *begin, *end; } blocks[MOST_BLOCKS];
static pthread_mutex_t blocks_lock = PTHREAD_MUTEX_INITIALIZER;

static int replace_block(char *old, char *begin, char *end) {
    int is_replaced = 0;
    pthread_mutex_lock(&blocks_lock);
    for (int number = 0; number < MOST_BLOCKS && !is_replaced; number++)
        if (blocks[number].begin == old) {
            blocks[number].begin = begin;
            blocks[number].end = end;
            is_replaced = 1;
        }
    pthread_mutex_unlock(&blocks_lock);
    return is_replaced;
}

int cudaHostAlloc(void **memory, size_t size, unsigned flags) {
    *memory = malloc(size);
    return replace_block(NULL, *memory, (char *)*memory + size) ? SUCCESS : refuse("more blocks of pinned memory");
}
int cudaFreeHost(void *memory) {
    replace_block(memory, NULL, NULL);
    free(memory);
    return SUCCESS;
}
int cudaPointerGetAttributes(void *attributes, const void *memory) {
    memset(attributes, 0, POINTER_BYTES);
    pthread_mutex_lock(&blocks_lock);
    for (int number = 0; number < MOST_BLOCKS; number++)
        if (blocks[number].begin <= (char *)memory && (char *)memory < blocks[number].end) *(int *)attributes = IS_HOST;
    pthread_mutex_unlock(&blocks_lock);
    return SUCCESS;
}

/* The driver's functions, which torch asks for by name */
int cuInit(unsigned flags) { return SUCCESS; }
int cuCtxGetCurrent(void **context) { *context = NULL; return SUCCESS; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) { *flags = 0; *is_active = 0; return SUCCESS; }
int cuGetErrorString(int error, const char **text) { *text = "no error"; return SUCCESS; }
int cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned version, unsigned long long flags, int *found) {
    void *known = NULL;
    if (!strcmp(name, "cuDevicePrimaryCtxGetState")) known = (void *)cuDevicePrimaryCtxGetState;
    if (!strcmp(name, "cuGetErrorString")) known = (void *)cuGetErrorString;
    if (!strcmp(name, "cuCtxGetCurrent")) known = (void *)cuCtxGetCurrent;
    *entry = known ? known : (void *)cudaGetLastError;
    if (found) *found = 0;
    return SUCCESS;
}
int cudaGetDriverEntryPoint(const char *name, void **entry, unsigned long long flags, int *found) {
    return cudaGetDriverEntryPointByVersion(name, entry, CUDA_VERSION, flags, found);
}

/* What no tensor of the simulation needs */
int cudaMalloc(void **memory, size_t size) { return refuse("cudaMalloc"); }
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) { return refuse("cudaMemcpyAsync"); }
int cudaMemsetAsync(void *memory, int value, size_t size, void *stream) { return refuse("cudaMemsetAsync"); }
int cudaLaunchKernel(const void *kernel, ...) { return refuse("cudaLaunchKernel"); }
int cudaLaunchKernelExC(const void *config, const void *kernel, void **arguments) { return refuse("cudaLaunchKernelExC"); }
