// Plays programs of ranks on SimGrid: an actor for each stream of a rank.
// Usage: engine PLATFORM.xml PROGRAMS TIMES THREADS BUSY PER_BYTE, the files in 64-bit numbers of this machine
// (engine.py writes and reads them). THREADS: of a rank's computing; 0: nothing waits for a core. BUSY, PER_BYTE:
// seconds, and seconds per byte, for which a message keeps a core busy at each of its ends.
#include <simgrid/s4u.hpp>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <memory>
#include <string>
#include <vector>

namespace sg4 = simgrid::s4u;

enum Kind : int64_t { COMPUTE, ISEND, IRECV, WAIT, AFTER };
constexpr int64_t LAST = -2;
constexpr double SPEED = 1e9; // of each core, in the platform

struct Op {
  int64_t kind, peer, mailbox, bytes, ref;
  double seconds;
};
struct Times {
  double begin, end, started, finished; // the last two: of the message that a WAIT waits for
};
struct Stream {
  std::vector<Op> ops;
  std::vector<Times> times;
  std::vector<char> awaited; // by operation: whether another stream waits for it
  size_t done = 0;
};
struct Rank {
  std::vector<Stream> streams;
  sg4::MutexPtr mutex;
  sg4::ConditionVariablePtr changed;
  int64_t number;
  sg4::Host* cores = nullptr;
};
struct Message {
  sg4::CommPtr comm;
  sg4::ExecPtr work; // of this end's core
  sg4::Host* cores = nullptr;
  int64_t* source = nullptr;
};

static std::vector<Rank> ranks;
static std::vector<sg4::Mailbox*> mailboxes;
static std::vector<std::deque<Message*>> unmet; // by mailbox: ends whose other end has not come
static std::vector<char> unmet_send;            // by mailbox: whether these send
static int threads = 0;
static double busy = 0, busy_per_byte = 0;

static int64_t number(FILE* file) {
  int64_t found;
  if (std::fread(&found, sizeof found, 1, file) != 1) {
    std::fprintf(stderr, "the programs are incomplete\n");
    std::exit(3);
  }
  return found;
}

static sg4::ExecPtr work(sg4::Host* cores, double seconds, int count) {
  sg4::ExecPtr exec = sg4::Exec::init();
  exec->set_host(cores)->set_flops_amount(seconds * SPEED * count)->set_thread_count(count);
  exec->start();
  return exec;
}

// An end of a message has come: if it is the second one, both ends' cores begin to copy. Ends meet in the order in which
// SimGrid matches them: first come, first served.
static void meet(int64_t mailbox, Message* message, bool sends, int64_t bytes) {
  auto& others = unmet[mailbox];
  if (others.empty() || unmet_send[mailbox] == sends) {
    unmet_send[mailbox] = sends;
    others.push_back(message);
    return;
  }
  Message* other = others.front();
  others.pop_front();
  const double seconds = busy + busy_per_byte * static_cast<double>(bytes);
  for (Message* end : {message, other}) end->work = work(end->cores, seconds, 1);
}

static void play(Rank* rank, Stream* stream) {
  std::vector<std::unique_ptr<Message>> under_way(stream->ops.size());
  const int count = stream == rank->streams.data() ? threads : 1; // only the main thread's computing takes several
  int64_t last = -1;
  for (size_t i = 0; i < stream->ops.size(); ++i) {
    const Op& op = stream->ops[i];
    Times& times = stream->times[i];
    times.begin = sg4::Engine::get_clock();
    const int64_t mailbox = op.peer == LAST ? op.mailbox + last : op.mailbox;
    switch (op.kind) {
      case COMPUTE:
        if (op.seconds > 0 && threads > 0) work(rank->cores, op.seconds, count)->wait();
        else if (op.seconds > 0) sg4::this_actor::sleep_for(op.seconds);
        break;
      case ISEND:
      case IRECV: {
        const bool sends = op.kind == ISEND;
        under_way[i] = std::make_unique<Message>();
        Message* message = under_way[i].get();
        message->cores = rank->cores;
        if (threads > 0 && (busy > 0 || (busy_per_byte > 0 && op.bytes > 0))) meet(mailbox, message, sends, op.bytes);
        if (sends) message->comm = mailboxes[mailbox]->put_async(&rank->number, static_cast<uint64_t>(op.bytes));
        else message->comm = mailboxes[mailbox]->get_async<int64_t>(&message->source);
        break;
      }
      case WAIT: {
        Message& message = *under_way[op.ref];
        message.comm->wait();
        times.started = message.comm->get_start_time();
        times.finished = message.comm->get_finish_time();
        if (message.work) {
          message.work->wait();
          times.finished = std::max(times.finished, message.work->get_finish_time());
        }
        if (message.source != nullptr) last = *message.source;
        under_way[op.ref].reset();
        break;
      }
      case AFTER: {
        Stream& other = rank->streams[op.peer];
        std::unique_lock<sg4::Mutex> lock(*rank->mutex);
        while (other.done <= static_cast<size_t>(op.ref)) rank->changed->wait(lock);
        break;
      }
    }
    times.end = sg4::Engine::get_clock();
    stream->done = i + 1;
    if (stream->awaited[i]) rank->changed->notify_all();
  }
}

int main(int argc, char** argv) {
  sg4::Engine engine(&argc, argv);
  if (argc != 7) return 3;
  threads = std::atoi(argv[4]);
  busy = std::atof(argv[5]);
  busy_per_byte = std::atof(argv[6]);
  engine.load_platform(argv[1]);
  FILE* file = std::fopen(argv[2], "rb");
  if (file == nullptr) return 3;
  ranks.resize(number(file));
  const int64_t boxes = number(file);
  for (auto& rank : ranks) {
    rank.number = number(file);
    const int64_t cores = number(file);
    if (threads > 0) rank.cores = sg4::Host::by_name("c" + std::to_string(cores));
    rank.streams.resize(number(file));
    for (auto& stream : rank.streams) {
      stream.ops.resize(number(file));
      stream.times.resize(stream.ops.size(), {0, 0, -1, -1});
      stream.awaited.resize(stream.ops.size());
      if (std::fread(stream.ops.data(), sizeof(Op), stream.ops.size(), file) != stream.ops.size()) return 3;
    }
    for (auto& stream : rank.streams)
      for (auto& op : stream.ops)
        if (op.kind == AFTER) rank.streams[op.peer].awaited[op.ref] = 1;
  }
  std::fclose(file);
  mailboxes.reserve(boxes);
  for (int64_t i = 0; i < boxes; ++i) mailboxes.push_back(sg4::Mailbox::by_name(std::to_string(i)));
  unmet.resize(boxes);
  unmet_send.resize(boxes);
  for (auto& rank : ranks) {
    rank.mutex = sg4::Mutex::create();
    rank.changed = sg4::ConditionVariable::create();
    auto* host = sg4::Host::by_name("h" + std::to_string(&rank - ranks.data()));
    for (auto& stream : rank.streams) {
      auto* own = &rank;
      auto* what = &stream;
      if (!stream.ops.empty()) sg4::Actor::create("r", host, [own, what] { play(own, what); });
    }
  }
  engine.run();
  FILE* answer = std::fopen(argv[3], "wb");
  if (answer == nullptr) return 3;
  for (auto& rank : ranks)
    for (auto& stream : rank.streams) {
      if (stream.done != stream.ops.size()) return 4; // a rank waits for ever
      if (std::fwrite(stream.times.data(), sizeof(Times), stream.times.size(), answer) != stream.times.size()) return 3;
    }
  return std::fclose(answer) == 0 ? 0 : 3;
}
