# What bash completes after `syncline`. Made by `syncline completion bash`:
#     source <(syncline completion bash)

_syncline_words() {
    case "$1" in
@TABLE@
    *) return 1 ;;
    esac
}

_syncline() {
    # Bash cuts words at = and :, so they are taken from the line itself.
    local line="${COMP_LINE:0:COMP_POINT}" verb="" option="" place=0 word current list
    local -a words
    read -ra words <<<"$line"
    current=""
    [[ $line == *[[:space:]] ]] || { current="${words[-1]}"; unset "words[-1]"; }
    for word in "${words[@]:1}"; do
        if [[ -n $option ]]; then
            option=""
        elif [[ $word == -* ]] && ((!place)); then
            _syncline_words "$verb $word" >/dev/null && option="$word"
        elif ((!place)) && _syncline_words "${verb:+$verb }$word" >/dev/null; then
            verb="${verb:+$verb }$word"
        else
            _syncline_words "$verb @rest" >/dev/null && place=1
        fi
    done
    COMPREPLY=()
    if [[ -n $option ]]; then
        [[ $current == *=* ]] && list="$(_syncline_words "$option ${current%%=*}=")" ||
            list="$(_syncline_words "$verb $option")"
    elif ((place)); then
        list="@file"
    elif [[ $current == -* ]]; then
        list="$(_syncline_words "$verb -")"
    else
        list="$(_syncline_words "$verb") $(_syncline_words "$verb @")"
    fi
    mapfile -t COMPREPLY < <(compgen -W "${list//@*/}" -- "$current")
    case "$list" in
    *@toml*) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -X '!*.toml' -- "$current"; compgen -d -- "$current") ;;
    *@file*) mapfile -t -O "${#COMPREPLY[@]}" COMPREPLY < <(compgen -f -- "$current") ;;
    esac
    [[ $list == *@file* || $list == *@toml* ]] && compopt -o filenames 2>/dev/null
    [[ ${COMPREPLY[0]} == *= ]] && compopt -o nospace 2>/dev/null
    if [[ $current == *[=:]* ]]; then
        word="${current%"${current##*[=:]}"}"
        COMPREPLY=("${COMPREPLY[@]#"$word"}")
    fi
}

complete -F _syncline syncline
