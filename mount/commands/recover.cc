// SPDX-License-Identifier: Apache-2.0

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <system_error>
#include <thread>

#include "core/base/mutex.h"
#include "core/base/strings.h"
#include "core/peer/memory_attempts.h"
#include "core/peer/peer_client.h"
#include "core/peer/tcp_transport.h"
#include "mount/commands/command_set.h"
#include "mount/commands/peer_steps.h"
#include "mount/control/step_json.h"
#include "mount/printable.h"
#include "snapshot/wire/protocol.h"

namespace ckptfs {
namespace {

constexpr const char* kStorePlace = "store";
constexpr const char* kMemoryPlace = "memory";
constexpr const char* kSpoolPlace = "spool";
constexpr size_t kAskers = 16;
constexpr int kAsks = 5;  // while daemons show different steps
constexpr std::chrono::seconds kBetweenAsks{1};
constexpr uint64_t kMostTurns = 1023;  // in which a job went back, whose saves are known by name

struct RecoverFlags {
  std::string run;
  std::string store;
  bool json = false;
};

// Returns what a daemon has of a run.
struct Survivor {
  std::vector<ShownMemoryStep> shown;  // the steps that it can show from memory
  std::vector<ShelvedPart> spooled;    // files in its spool
};

// All that daemons have, by those that answered.
struct Survivors {
  std::vector<std::vector<ShownMemoryStep>> shown;
  PeerShelves spooled;
  std::vector<std::string> away;  // why others are not asked
};

Result<Survivor> AskOne(const PeerRecord& peer, const PeerIdentity& self, const std::string& run) {
  TcpTransport transport({.from = "", .patience = kPeerPatience});
  CKPT_ASSIGN_OR_RETURN(const auto client,
                        PeerClient::Connect(transport, peer.address, peer.node, self));
  Survivor found;
  CKPT_ASSIGN_OR_RETURN(found.shown, client->Show(run));
  CKPT_ASSIGN_OR_RETURN(found.spooled, client->Spooled(run));
  return found;
}

Result<Survivors> AskAll(Store& store, const std::string& run) {
  Survivors survivors;
  CKPT_ASSIGN_OR_RETURN(const KnownPeers known, FindPeers(store));
  const std::vector<PeerRecord>& peers = known.peers;
  Mutex mutex;
  std::atomic<size_t> next{0};
  const auto work = [&] {
    for (size_t i = next++; i < peers.size(); i = next++) {
      auto found = AskOne(peers[i], known.self, run);
      MutexLock lock(mutex);
      if (found) {
        survivors.shown.push_back(std::move(found->shown));
        survivors.spooled[peers[i].node] = std::move(found->spooled);
      } else {
        survivors.away.push_back(
            StrCat(peers[i].host, " (", peers[i].address, "): ", found.error().message));
      }
    }
  };
  std::vector<std::thread> threads;
  try {
    for (size_t i = 1; i < std::min(peers.size(), kAskers); ++i) threads.emplace_back(work);
  } catch (const std::system_error&) {
    // Those that did start ask all.
  }
  work();
  for (std::thread& thread : threads) thread.join();
  return survivors;
}

bool Differ(const Survivors& survivors) {
  return std::any_of(survivors.shown.begin(), survivors.shown.end(),
                     [&](const auto& shown) { return shown != survivors.shown.front(); });
}

// Daemons show a new step a moment apart.
Result<Survivors> AskUntilTheyAgree(Store& store, const std::string& run) {
  for (int ask = 1;; ++ask) {
    CKPT_ASSIGN_OR_RETURN(Survivors survivors, AskAll(store, run));
    if (!Differ(survivors)) return survivors;
    if (ask == kAsks) {
      fmt::print(stderr,
                 "ckptfs: daemons show different steps from memory; one that all show is "
                 "taken\n");
      return survivors;
    }
    std::this_thread::sleep_for(kBetweenAsks);
  }
}

// The newest step that every daemon which answers can show.
std::optional<ShownMemoryStep> Common(const Survivors& survivors) {
  std::optional<ShownMemoryStep> newest;
  if (survivors.shown.empty()) return newest;
  for (const ShownMemoryStep& step : survivors.shown.front()) {
    const bool all =
        std::all_of(survivors.shown.begin(), survivors.shown.end(), [&](const auto& other) {
          return std::find(other.begin(), other.end(), step) != other.end();
        });
    if (all && (!newest || newest->mtime_ns < step.mtime_ns)) newest = step;
  }
  return newest;
}

// The newest save of which spools have all ranks' files, as a step that has no name yet.
std::optional<ShownMemoryStep> Spooled(const Survivors& survivors) {
  const std::vector<MemoryAttempt> attempts = AttemptsOn(survivors.spooled);
  const MemoryAttempt* newest = nullptr;
  for (const MemoryAttempt& attempt : attempts) {
    if (attempt.whole() && (newest == nullptr || IsEarlier(*newest, attempt))) newest = &attempt;
  }
  if (newest == nullptr) return std::nullopt;
  return ShownMemoryStep{newest->name, "", {}, newest->Directory(), newest->mtime_ns, newest->step};
}

// A step that has no place in the store, and where it is.
struct Unstored {
  std::string place;
  ShownMemoryStep step;
};

// The newer one of what is in memory and in spools; the same save can be loaded from memory.
std::optional<Unstored> NewestUnstored(const Survivors& survivors) {
  const auto memory = Common(survivors);
  auto spooled = Spooled(survivors);
  const auto attempt = [](const ShownMemoryStep& step) {
    MemoryAttempt made;
    made.name = step.name;
    made.mtime_ns = step.mtime_ns;
    return made;
  };
  if (spooled && (!memory || IsEarlier(attempt(*memory), attempt(*spooled))))
    return Unstored{kSpoolPlace, *std::move(spooled)};
  if (memory) return Unstored{kMemoryPlace, *memory};
  return std::nullopt;
}

// True if files lie where that attempt, or an earlier save of `step` in the same life, put them.
bool IsUpTo(std::string_view directory, AttemptName attempt, uint64_t step) {
  const uint64_t last = attempt.attempt;
  const uint64_t turn = TurnOf(last);
  for (uint64_t back = 0; back <= std::min(turn, kMostTurns); ++back) {
    for (const uint64_t number : AttemptsOf(turn - back, step)) {
      if (number > last) break;
      attempt.attempt = number;
      if (PreparedPart{attempt, step, 0, 0, {}}.Directory() == directory) return true;
    }
  }
  return false;
}

// True if the store's step is to be taken: it was saved after the other one, or it is the same
// save, which lies in spools still.  A durable step's time may be that of its end: where its
// attempt is known, that counts.
Result<bool> IsTaken(Store& store, const StepRecord& record, const Unstored& other) {
  const ShownMemoryStep& step = other.step;
  CKPT_ASSIGN_OR_RETURN(const auto loaded, store.Load(record));
  const std::vector<Blob>& blobs = loaded->model.blobs;
  if (!blobs.empty()) {
    const std::string there = ParentPath(blobs.front().path);
    if (there == step.directory) return other.place == kSpoolPlace;
    if (IsUpTo(there, step.name, record.iteration)) return false;
  }
  return record.mtime_ns >= step.mtime_ns;
}

void Print(const RecoverFlags& options, const std::string& place, const std::string& id,
           uint64_t step) {
  // A save that lies in spools gets its name from the store.
  const std::string below = place == kStorePlace ? "" : StrCat(place, "/");
  const std::string where = StrCat(options.run, "/", below, id.empty() ? StrCat(step) : id);
  if (options.json) {
    PrintJson(
        {{"run", options.run}, {"place", place}, {"id", id}, {"step", where}, {"iteration", step}});
  } else {
    fmt::print("{}\n", Printable(where));
  }
  if (place == kSpoolPlace) {
    fmt::print(stderr,
               "ckptfs: it lies in spools alone, and can be loaded once the store has it: ask "
               "again then\n");
  }
}

Status RunRecover(const RecoverFlags& options) {
  CKPT_ASSIGN_OR_RETURN(const auto store, OpenStore(options.store, false));
  CKPT_ASSIGN_OR_RETURN(const Survivors survivors, AskUntilTheyAgree(*store, options.run));
  for (const std::string& line : survivors.away) {
    fmt::print(stderr, "ckptfs: does not answer: {}\n", Printable(line));
  }
  const auto other = NewestUnstored(survivors);
  const auto latest = store->Resolve(options.run, "latest");
  if (!latest && latest.error().code != ErrorCode::kNotFound && !other) {
    return Fail(Error(latest.error()));
  }
  bool taken = latest.has_value() && !other;
  if (latest && other) {
    const auto is_taken = IsTaken(*store, *latest, *other);
    if (!is_taken) {
      fmt::print(stderr, "ckptfs: the newest durable step is passed over: {}\n",
                 Printable(is_taken.error().message));
    }
    taken = is_taken.value_or(false);
  }
  if (taken) {
    Print(options, kStorePlace, latest->id, latest->iteration);
  } else if (other) {
    Print(options, other->place, other->step.id, other->step.step);
  } else {
    return Fail(ErrorCode::kNotFound,
                StrCat("run '", options.run, "' has no step, durable, in memory or in a spool"));
  }
  return {};
}

}  // namespace

void AddRecoverCommand(CommandSet& commands) {
  auto options = std::make_shared<RecoverFlags>();
  Command& command =
      commands.Add("recover", "Print the newest step: in memory, in spools, or durable");
  command.Add("RUN", options->run, "The run").Required().Offers(kOfferRuns);
  AddStoreOption(command, options->store);
  AddJsonOption(command, options->json);
  command.body = [options] { return RunRecover(*options); };
}

}  // namespace ckptfs
