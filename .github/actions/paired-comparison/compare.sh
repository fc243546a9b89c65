#!/usr/bin/env bash
# Runs `d5suite ab`, shows its summary in the job's page, and ends with its exit code; 6, too noisy to tell, ends with
# 0 and a warning unless UNCERTAIN is "fail". Inputs come as variables, so that nothing in them is run as a command.
set -uo pipefail
d5suite=$(cd "$GITHUB_ACTION_PATH/../../.." && pwd)
results=$RUNNER_TEMP/d5suite-comparison
rm -rf "$results"
mkdir -p "$results"

case $UNCERTAIN in
    warn | fail) ;;
    *)
        echo "::error::uncertain: \"$UNCERTAIN\" is neither warn nor fail"
        exit 2
        ;;
esac

recipes=()
while read -r recipe; do
    [[ -n $recipe ]] || continue
    if [[ ! -e ${recipe%%::*} && -e $d5suite/${recipe%%::*} ]]; then
        recipe=$d5suite/$recipe
    fi
    recipes+=("$recipe")
done < <(tr -s ' \n' '\n' <<<"$RECIPES")

chosen=(--preset "$PRESET")
[[ -n $BACKEND ]] && chosen+=(--backend "$BACKEND")
[[ -n $EFFECT ]] && chosen+=(--effect "$EFFECT")
mapfile -t further < <(grep -v '^[[:space:]]*$' <<<"$OPTIONS")

"${ENVIRONMENT:-$RUNNER_TEMP/d5suite}/bin/d5suite" ab --a "$A" --b "$B" "${recipes[@]}" "${chosen[@]}" \
    --json "$results/comparison.json" --markdown "$results/comparison.md" --junit "$results/comparison.xml" \
    -- "${further[@]}"
code=$?

echo "code=$code" >>"$GITHUB_OUTPUT"
if [[ -s $results/comparison.md ]]; then
    cat "$results/comparison.md" >>"$GITHUB_STEP_SUMMARY"
else
    echo "d5suite ab ended with $code before it had a verdict; the log says why." >>"$GITHUB_STEP_SUMMARY"
fi
if [[ $code == 6 && $UNCERTAIN == warn ]]; then
    echo "::warning title=d5suite::too noisy to tell: use a quieter runner, or more pairs"
    exit 0
fi
exit "$code"
