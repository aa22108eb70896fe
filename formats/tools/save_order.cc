// SPDX-License-Identifier: Apache-2.0

#include "formats/tools/save_order.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "core/base/strings.h"
#include "core/state/run_listings.h"
#include "formats/tools/step_names.h"

namespace ckptfs {
namespace {

enum class LastIn { kOwn, kParts, kBeside, kBesideOwn };

struct SaveOrder {
  StepTool tool = StepTool::kNone;
  FormatOrder format = FormatOrder::kNone;
  std::string_view name;    // "transformers' Trainer"
  std::string_view writer;  // in messages
  std::string_view writes;  // in order; what stands in braces it may leave out, a bar stands
                            // between alternatives
  std::string_view last;
  LastIn in = LastIn::kOwn;
  std::string_view more =
      {};               // how files begin that may follow the last; the step before has as many
  bool always = false;  // nobody can tell it not to write its last file
};

constexpr std::array kOrders = {
    SaveOrder{
        StepTool::kTrainer,
        FormatOrder::kNone,
        "transformers' Trainer",
        "Trainer",
        "config.json, model*|pytorch_model*, training_args.bin | pytorch_model_fsdp_0/, "
        "optimizer_0/ | "
        "global_step<N>/, latest; {optimizer.pt}, scheduler.pt, rng_state*.pth, trainer_state.json",
        kTrainerState,
        LastIn::kOwn,
        {},
        true},
    SaveOrder{
        StepTool::kAccelerate, FormatOrder::kNone, "accelerate", "accelerate",
        "model*|pytorch_model*, optimizer*.bin | pytorch_model_fsdp_0/, optimizer_0/ | "
        "pytorch_model/, latest; "
        "scheduler*.bin, {sampler*.bin}, random_states_<rank>.pkl, {custom_checkpoint_<N>.pkl}",
        "random_states_0.pkl", LastIn::kOwn, "custom_checkpoint_", true},
    SaveOrder{StepTool::kLightning,
              FormatOrder::kNone,
              "Lightning",
              "Lightning",
              "__<rank>_<N>.distcp, .metadata, meta.pt",
              kLightningMeta,
              LastIn::kParts,
              {},
              true},
    SaveOrder{StepTool::kNone, FormatOrder::kDcp, "", "DCP", "__<rank>_<N>.distcp, .metadata",
              ".metadata", LastIn::kParts},
    SaveOrder{StepTool::kNone, FormatOrder::kDeepSpeed, "", "DeepSpeed",
              "*_model_states.pt, {*_optim_states.pt}, {zero_to_fp32.py}, {latest}", "latest",
              LastIn::kBeside},
    SaveOrder{StepTool::kNone, FormatOrder::kMegatron, "", "megatron-core",
              "{common.pt}, __<rank>_<N>.distcp, .metadata, metadata.json, "
              "{latest_checkpointed_iteration.txt}",
              "metadata.json", LastIn::kParts},
    SaveOrder{StepTool::kNone, FormatOrder::kMegatronLegacy, "", "Megatron",
              "mp_rank_*/{distrib_optim.pt}, mp_rank_*/model_optim_rng.pt, "
              "latest_checkpointed_iteration.txt",
              "latest_checkpointed_iteration.txt", LastIn::kBesideOwn},
    SaveOrder{StepTool::kNone, FormatOrder::kVerl, "", "verl",
              "model_world_size_*, {optim_world_size_*}, {extra_state_world_size_*}, huggingface/, "
              "fsdp_config.json, data*.pt, latest_checkpointed_iteration.txt",
              "latest_checkpointed_iteration.txt", LastIn::kBesideOwn},
    SaveOrder{StepTool::kNone, FormatOrder::kSkyRl, "", "SkyRL",
              "model_world_size_*, optim_world_size_*, extra_state_world_size_*, huggingface/, "
              "fsdp_config.json, {data.pt}, trainer_state.pt, latest_ckpt_global_step.txt",
              "latest_ckpt_global_step.txt", LastIn::kBesideOwn},
};

const SaveOrder* OrderOf(StepTool tool) {
  const auto row =
      std::ranges::find_if(kOrders, [&](const SaveOrder& one) { return one.tool == tool; });
  return tool == StepTool::kNone || row == kOrders.end() ? nullptr : &*row;
}

const SaveOrder* OrderOf(FormatOrder format) {
  const auto row =
      std::ranges::find_if(kOrders, [&](const SaveOrder& one) { return one.format == format; });
  return format == FormatOrder::kNone || row == kOrders.end() ? nullptr : &*row;
}

// ---- By what the tool of a directory is told ------------------------------------

enum class Form { kAny, kTrainers, kLightnings, kModelCheckpoints };

// ModelCheckpoint's own among Lightning's names; what else ends so may be somebody's dcp.save.
bool IsOf(Form form, std::string_view name) {
  switch (form) {
    case Form::kAny: return true;
    case Form::kTrainers: return IsTrainerName(name);
    case Form::kLightnings: return IsLightningName(name);
    case Form::kModelCheckpoints:
      return IsLightningName(name) && (name.find("step=") != std::string_view::npos ||
                                       name.find("epoch=") != std::string_view::npos);
  }
  return false;
}

// Names of entries: a star stands for the rest, a slash at the end for a directory.
struct Sign {
  StepTool tool = StepTool::kNone;
  Form name = Form::kAny;
  std::string_view with = {};     // "": whatever is there
  std::string_view without = {};  // "": whatever is not
};

// The first that holds says whose the directory is.
constexpr std::array kWrote = {
    Sign{StepTool::kLightning, Form::kLightnings},
    Sign{StepTool::kTrainer, Form::kAny, kTrainerState},
    Sign{StepTool::kAccelerate, Form::kAny, "random_states_*.pkl"},
    Sign{StepTool::kAccelerate, Form::kAny, "pytorch_model/"},
    Sign{StepTool::kTrainer, Form::kTrainers},
};

// The first that holds says whose last file is yet to come, of a directory without that of any
// tool. Weights and optimizer that are both there may be a script's own.
constexpr std::array kWrites = {
    Sign{StepTool::kLightning, Form::kModelCheckpoints, ".metadata", kLightningMeta},
    Sign{StepTool::kTrainer, Form::kTrainers, "training_args.bin"},
    Sign{StepTool::kTrainer, Form::kTrainers, "pytorch_model_fsdp*", "optimizer*"},
    Sign{StepTool::kAccelerate, Form::kAny, "pytorch_model_fsdp*", "optimizer*"},
    Sign{StepTool::kAccelerate, Form::kAny, "pytorch_model/"},
};

// The last files by which a whole step tells what the next one's tool is.
constexpr std::array kLeft = {
    Sign{StepTool::kAccelerate, Form::kAny, "random_states_*.pkl"},
    Sign{StepTool::kTrainer, Form::kAny, kTrainerState},
};

bool Fits(std::string_view name, std::string_view pattern) {
  const size_t star = pattern.find('*');
  if (star == std::string_view::npos) return name == pattern;
  return name.size() + 1 >= pattern.size() && name.starts_with(pattern.substr(0, star)) &&
         name.ends_with(pattern.substr(star + 1));
}

bool Has(const StepEntries& entries, std::string_view pattern) {
  const bool only_directory = pattern.ends_with('/');
  if (only_directory) pattern.remove_suffix(1);
  const auto fits = [&](const std::string& name) { return Fits(name, pattern); };
  if (std::ranges::any_of(entries.directories, fits)) return true;
  return !only_directory && std::ranges::any_of(entries.files, fits);
}

template <size_t kCount>
StepTool FirstOf(const std::array<Sign, kCount>& signs, std::string_view name,
                 const StepEntries& entries) {
  const auto holds = [&](const Sign& sign) {
    return IsOf(sign.name, name) && (sign.with.empty() || Has(entries, sign.with)) &&
           (sign.without.empty() || !Has(entries, sign.without));
  };
  const auto found = std::ranges::find_if(signs, holds);
  return found == signs.end() ? StepTool::kNone : found->tool;
}

// ---- The steps before ------------------------------------------------------------

constexpr size_t kMaxEarlier = 2;  // steps of the same run that are looked at

// "checkpoint-" of "checkpoint-500": steps of one run have it in common.
std::string_view WithoutNumber(std::string_view name) {
  return name.substr(0, name.find_last_not_of("0123456789") + 1);
}

std::optional<RunListings::Numbered> NumberedStep(std::string_view name) {
  const auto number = StepNumber(name);
  if (!number) return std::nullopt;
  return RunListings::Numbered{WithoutNumber(name), *number};
}

// Returns what is in the steps before `own` in the same run,
// the nearest first; passes over those that are out of reach.
Result<std::vector<StepEntries>> EarlierSteps(const Root& root, const std::string& own,
                                              const SaveHistory& history) {
  std::vector<StepEntries> out;
  const std::string name = LastComponent(root.PathOf(own));
  const auto step = NumberedStep(name);
  if (own.empty() || !step) return out;
  const std::string above = ParentPath(own);
  RunListings alone;
  RunListings& listings = history.listings ? *history.listings : alone;
  const auto run = listings.StepsOf(root, above, step->run, NumberedStep);
  if (!run && IsOutOfReach(run.error())) return out;
  if (!run) return Fail(Error(run.error()));
  RunListings::Steps& steps = **run;
  auto at = steps.lower_bound({step->number, ""});
  while (at != steps.begin() && out.size() < kMaxEarlier) {
    --at;
    auto entries = ListStepEntries(root, JoinPath(above, at->second));
    if (!entries && !IsOutOfReach(entries.error())) return Fail(std::move(entries).error());
    if (entries) {
      out.push_back(*std::move(entries));
    } else {
      at = steps.erase(at);  // no step asks for it again
    }
  }
  return out;
}

// The tool whose last file is yet to be written, as the directory tells or, if it does not, the
// steps before it: the first that is whole says which tool saves here.
Result<StepTool> ToolThatWrites(const Root& root, const std::string& own,
                                const StepEntries& entries, const SaveHistory& history) {
  const std::string name = LastComponent(root.PathOf(own));
  if (FirstOf(kLeft, name, entries) != StepTool::kNone && !IsLightningName(name))
    return StepTool::kNone;
  const StepTool itself = FirstOf(kWrites, name, entries);
  if (itself != StepTool::kNone || IsLightningName(name)) return itself;
  CKPT_ASSIGN_OR_RETURN(const std::vector<StepEntries> earlier, EarlierSteps(root, own, history));
  for (const StepEntries& step : earlier) {
    const StepTool tool = FirstOf(kLeft, name, step);
    if (tool != StepTool::kNone) return tool;
  }
  return StepTool::kNone;
}

// ---- What is written last ----------------------------------------------------------

struct LastFiles {
  std::vector<std::string> paths;  // below the root
  bool told = true;                // all of them are listed
  bool lacks = false;              // some that the step before has
};

// Objects of the job's own, which follow the last file: as many as the step before had.
Status AddMore(const SaveOrder& order, const StepCandidate& step, const std::string& own,
               const StepEntries& entries, const SaveHistory& history, LastFiles& out) {
  const auto is = [&](const std::string& path) {
    return LastComponent(path).starts_with(order.more);
  };
  CKPT_ASSIGN_OR_RETURN(const std::vector<StepEntries> earlier,
                        EarlierSteps(*step.root, own, history));
  size_t count = 0;
  for (const std::string& name : entries.files) {
    if (!is(name)) continue;
    out.paths.push_back(JoinPath(own, name));
    ++count;
  }
  out.told = !earlier.empty() || history.before != nullptr;
  if (!out.told) return {};
  const auto before = earlier.empty() ? std::ranges::count_if(*history.before, is)
                                      : std::ranges::count_if(earlier.front().files, is);
  out.lacks = count < static_cast<size_t>(before);
  return {};
}

// True if an entry of a directory is newer than `end`, but for those that only grow.
Result<bool> HasNewer(const Root& root, const std::string& directory, int64_t end,
                      const SaveHistory& history) {
  CKPT_ASSIGN_OR_RETURN(const std::vector<RootEntry> entries, root.List(directory));
  for (const RootEntry& entry : entries) {
    const std::string path = JoinPath(directory, entry.name);
    if (history.growing.contains(path)) continue;
    CKPT_ASSIGN_OR_RETURN(const auto found, StatIfThere(root, path));
    if (found && found->stamp.mtime_ns > end) return true;
  }
  return false;
}

// A file that a tool has just written has one time; a copy has that of its original, too.
constexpr int64_t kJustWritten = 10'000'000'000;  // ns

// Programs that copy write in an order of their own: their last file proves nothing.
bool WasCopied(const FileStamp& stamp) { return stamp.ctime_ns > stamp.mtime_ns + kJustWritten; }

// Each part has a last file, the newest there.  If there are two parts, one may come yet.
Result<SavePhase> PhaseOfParts(const SaveOrder& order, const StepCandidate& step,
                               const SavePlaces& places, const SaveHistory& history) {
  bool sealed = places.parts.size() == 1;
  for (const std::string& part : places.parts) {
    const std::string last = JoinPath(part, order.last);
    CKPT_ASSIGN_OR_RETURN(const auto written, StatIfThere(*step.root, last));
    if (!written) return order.always ? SavePhase::kAllButLast : SavePhase::kProvisional;
    if (history.growing.contains(last)) return SavePhase::kProvisional;
    CKPT_ASSIGN_OR_RETURN(const bool newer,
                          HasNewer(*step.root, part, written->stamp.mtime_ns, history));
    sealed = sealed && !newer && !WasCopied(written->stamp);
  }
  return sealed ? SavePhase::kSealed : SavePhase::kProvisional;
}

// All last files are there, and nothing of the step is newer: other ranks may write theirs after
// them.
Result<SavePhase> PhaseOf(const SaveOrder& order, const StepCandidate& step, const LastFiles& last,
                          const SaveHistory& history) {
  const SavePhase missing = order.always ? SavePhase::kAllButLast : SavePhase::kProvisional;
  if (last.lacks) return missing;
  bool told = last.told;
  int64_t end = 0;
  for (const std::string& path : last.paths) {
    CKPT_ASSIGN_OR_RETURN(const auto there, StatIfThere(*step.root, path));
    if (!there) return missing;
    told = told && !history.growing.contains(path) && !WasCopied(there->stamp);
    end = std::max(end, there->stamp.mtime_ns);
  }
  return told && end >= step.mtime_ns ? SavePhase::kSealed : SavePhase::kProvisional;
}

// Returns the state of a save that a tool has begun and whose last file is not there.
SaveState BegunBy(const SaveOrder& order, const Root& root, const std::string& own) {
  SaveState out = SaveState::Begun(Error{
      ErrorCode::kInvalid,
      StrCat(root.PathOf(own), ": no ", order.last, ", which ", order.writer,
             " writes last: the save was cut off (`adopt --weights-only` takes the weights)")});
  out.last = JoinPath(own, order.last);
  return out;
}

Result<SaveState> Evaluate(const StepCandidate& step, const SavePlaces& places,
                           const SourceOptions& options, const SaveHistory& history) {
  const Root& root = *step.root;
  SaveState out;
  StepEntries entries;
  const SaveOrder* order = nullptr;
  CKPT_ASSIGN_OR_RETURN(const bool around,
                        HasDirectory(root, places.own.empty() ? step.directory : places.own));
  if (!places.own.empty() && around) {
    CKPT_ASSIGN_OR_RETURN(entries, ListStepEntries(root, places.own));
    CKPT_ASSIGN_OR_RETURN(const StepTool writes,
                          ToolThatWrites(root, places.own, entries, history));
    const SaveOrder* const begun = OrderOf(writes);
    if (begun != nullptr && !options.weights_only) return BegunBy(*begun, root, places.own);
    order = OrderOf(ToolOf(LastComponent(root.PathOf(places.own)), entries));
  }
  if (order != nullptr && order->in == LastIn::kParts && places.parts.empty()) order = nullptr;
  if (order == nullptr) order = OrderOf(places.format);
  if (order == nullptr) return out;
  if (order->in == LastIn::kParts) {
    if (places.parts.size() == 1) out.last = JoinPath(places.parts.front(), order->last);
    CKPT_ASSIGN_OR_RETURN(out.phase, PhaseOfParts(*order, step, places, history));
    return out;
  }
  const bool beside = order->in == LastIn::kBeside || order->in == LastIn::kBesideOwn;
  LastFiles last;
  const std::string& of_save = order->in == LastIn::kBesideOwn ? step.Own() : step.directory;
  // A tag may lie in folders of its save directory; of what a tool wrote around only the tool
  // knows.
  const bool tag = order->in == LastIn::kBeside && step.own.empty();
  const std::string where = tag ? step.save : beside ? ParentPath(of_save) : places.own;
  last.paths = {JoinPath(where, order->last)};
  if (!beside || step.latest) out.last = last.paths.front();
  if (!order->more.empty())
    CKPT_RETURN_IF_ERROR(AddMore(*order, step, places.own, entries, history, last));
  CKPT_ASSIGN_OR_RETURN(out.phase, PhaseOf(*order, step, last, history));
  return out;
}

}  // namespace

StepTool ToolOf(std::string_view name, const StepEntries& entries) {
  return FirstOf(kWrote, name, entries);
}

std::string_view ToolName(StepTool tool) {
  const SaveOrder* const order = OrderOf(tool);
  return order == nullptr ? std::string_view() : order->name;
}

SaveState StateOfSave(const StepCandidate& step, const SavePlaces& places,
                      const SourceOptions& options, const SaveHistory& history) {
  auto state = Evaluate(step, places, options, history);
  return state ? *std::move(state) : SaveState::Begun(std::move(state).error());
}

std::string MissingOfBegun(const StepEntries& entries) {
  const bool shards = std::ranges::any_of(entries.files, [](const std::string& file) {
    return (file.starts_with("model-") || file.starts_with("pytorch_model-")) &&
           file.find("-of-") != std::string::npos;
  });
  return shards ? "shards of weights, but not yet the index that is written after them"
                : "no weights yet";
}

const ToolNames& NamesOfTools() {
  static constexpr std::array<std::string_view, 7> kSaved = {
      ".pt", ".pth", ".bin", ".ckpt", ".pkl", ".safetensors", ".distcp"};
  // rsync and others that hide theirs; trainers of a step; rclone; the hub's downloads.
  static constexpr std::array<std::string_view, 2> kStarts = {".", "tmp-"};
  static constexpr std::array<std::string_view, 3> kEnds = {".tmp", ".partial", ".incomplete"};
  static constexpr std::array<std::string_view, 2> kStepsFolders = {"checkpoints", "checkpoint"};
  static constexpr std::array kRandom = {ToolNames::Random{true, 6},    // rsync, .NAME.XXXXXX
                                         ToolNames::Random{false, 8}};  // aws s3 cp, NAME.XXXXXXXX
  static constexpr ToolNames kNames = {kSaved, kStarts, kEnds, kStepsFolders, kRandom};
  return kNames;
}

}  // namespace ckptfs
